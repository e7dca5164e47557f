"""Does routing matter to a trained model? Its losses and metrics with other routes.

See :mod:`comet_moe.interventions`: samples exchange their routes, or all get the mean weights of their batch.
The interval of a metric comes from a jackknife: the metric without each tenth of the rows.

Shapes: B rows, R exchanges.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comet_moe.checks import without_value_checks
from comet_moe.devices import Placement
from comet_moe.experiments.data import Split
from comet_moe.experiments.models import Model
from comet_moe.experiments.training.batches import Batch, take_rows
from comet_moe.experiments.training.groups import Grouping, Groups, make_groupings
from comet_moe.experiments.training.metrics import TaskMetrics
from comet_moe.experiments.training.records import ChangeRecord, GainRecord, Metrics
from comet_moe.interventions import CONFIDENCE, Intervention, intervene, summarise_gain
from comet_moe.kernels.mix import weights_dtype
from comet_moe.mixture.find import outermost_gates

REPEATS = 5
MAX_ROWS = 4096
"""Rows to measure on, evenly spaced; they are one batch, so that all of them exchange their routes."""
FOLDS = 10

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Outcome:
    """What a model does on some rows.

    Attributes:
        losses: (B,), whose mean is the loss.
        metrics: from the indices of units to the metrics of each task on them.
        units: number of what metrics are computed on, such as rows.
    """

    losses: Tensor
    metrics: Callable[[Index], dict[str, Metrics]]
    units: int


RunModel = Callable[[Intervention | None, int, Iterable[str] | None], Outcome]
"""Runs a model with an intervention or None, a seed, and the names of the gates to change."""


@torch.no_grad()
@without_value_checks()
def measure_gain(
    model: Model, split: Split, placement: Placement, groups: Groups | None = None
) -> GainRecord | None:
    """The routing gain of ``model``, which is in eval mode, on rows of ``split``; None without a mixture.

    Losses are times 100 and weighted over the tasks, as the model's own. ``groups`` are columns by which the
    gain is recorded, beside the class of each task; None records it by no column.
    """
    gates = choosing_gates(model)
    if not gates or len(split) < 2:
        return None
    rows = spread_rows(len(split), MAX_ROWS)
    batch = take_rows(split, rows)
    names = model.gate_names if len(model.gate_names) == len(gates) else gates

    def run(kind: Intervention | None, seed: int, changed: Iterable[str] | None) -> Outcome:
        return _run(model, batch, placement, kind, seed, changed)

    by_gate = dict(zip(names, gates, strict=True))
    return gain_record(run, by_gate, rows, make_groupings(model.tasks, split, groups).values())


def choosing_gates(model: torch.nn.Module) -> list[str]:
    """The names of the gates that have a choice."""
    return [name for name, gate, _ in outermost_gates(model) if gate.num_experts > 1]


def spread_rows(count: int, most: int) -> Index:
    """At most ``most`` of ``count`` rows, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, most).astype(np.int64))


def gain_record(
    run: RunModel,
    gates: Mapping[str, str],
    rows: Index,
    groupings: Iterable[Grouping] = (),
    repeats_per_gate: int = REPEATS,
) -> GainRecord:
    """The gains of a model on ``rows`` of a split.

    Args:
        run: runs the model on these rows.
        gates: the name of each gate in the model, by its task or layer.
        rows: (B,) their positions in the split.
        groupings: of the rows of the split.
        repeats_per_gate: exchanges of the routes of each gate alone.
    """
    before = run(None, 0, None)
    every = list(gates.values())

    def change(kind: Intervention, names: list[str], repeats: int) -> tuple[Tensor, list[Outcome]]:
        """(R, B) differences of the losses, and the outcomes."""
        after = [run(kind, seed, names) for seed in range(repeats)]
        return torch.stack([outcome.losses for outcome in after]) - before.losses, after

    differences, changed = change("shuffle", every, REPEATS)
    return GainRecord(
        **summarise_gain(differences),
        rows=len(rows),
        mean_routes=ChangeRecord(**summarise_gain(change("mean", every, 1)[0])),
        by_gate={
            owner: ChangeRecord(**summarise_gain(change("shuffle", [name], repeats_per_gate)[0]))
            for owner, name in gates.items()
        },
        by_group={grouping.name: _by_group(differences, grouping, rows) for grouping in groupings},
        metrics=_metric_changes(before, changed),
    )


def _by_group(differences: Tensor, grouping: Grouping, rows: Index) -> dict[str, ChangeRecord]:
    groups = torch.from_numpy(grouping.groups[rows])
    found = {}
    for number, label in enumerate(grouping.labels):
        of_group = differences[:, groups == number]
        if of_group.shape[1]:
            found[label] = ChangeRecord(**summarise_gain(of_group), rows=of_group.shape[1])
    return found


def _run(
    model: Model,
    batch: Batch,
    placement: Placement,
    kind: Intervention | None,
    seed: int,
    gates: Iterable[str] | None,
) -> Outcome:
    with placement.autocast(), intervene(model, kind, seed=seed, gates=gates) if kind else nullcontext():
        outputs, _ = model(placement.move(batch.features))
    outputs = [output.to("cpu", weights_dtype(output.dtype)) for output in outputs]
    total = torch.zeros(len(batch), dtype=torch.float64)
    for task, output in zip(model.tasks, outputs, strict=True):
        total += 100 * task.weight * task.mean_row_losses(output, batch.targets).double()

    def metrics(units: Index) -> dict[str, Metrics]:
        chosen = torch.from_numpy(units)
        part = Batch(*({name: values[chosen] for name, values in side.items()} for side in batch))
        found = {}
        for task, output in zip(model.tasks, outputs, strict=True):
            accumulator = TaskMetrics(task, model.has_table_metrics)
            accumulator.add(output[chosen], part)
            found[task.name] = accumulator.metrics()
        return found

    return Outcome(total, metrics, len(batch))


def _metric_changes(before: Outcome, after: Sequence[Outcome]) -> dict[str, dict[str, ChangeRecord]]:
    units = np.arange(before.units)
    folds = (
        [np.delete(units, slice(fold, None, FOLDS)) for fold in range(FOLDS)] if len(units) > FOLDS else []
    )
    runs = [_subtract(outcome.metrics(units), before.metrics(units)) for outcome in after]
    without = [_subtract(after[0].metrics(fold), before.metrics(fold)) for fold in folds]
    return {
        task: {
            name: _summarise([run[task][name] for run in runs], [fold[task][name] for fold in without])
            for name in changes
        }
        for task, changes in runs[0].items()
    }


def _subtract(after: dict[str, Metrics], before: dict[str, Metrics]) -> dict[str, dict[str, float]]:
    """The changes; NaN where a metric does not exist."""

    def difference(new: float | None, old: float | None) -> float:
        return math.nan if new is None or old is None else new - old

    return {
        task: {name: difference(after[task][name], old) for name, old in metrics.items()}
        for task, metrics in before.items()
    }


def _summarise(runs: list[float], folds: list[float]) -> ChangeRecord:
    """The mean of the changes in R runs, with the error over runs and that of the jackknife over rows."""
    gain = float(np.mean(runs))
    if not folds or not np.isfinite([*runs, *folds]).all():
        return ChangeRecord(gain=gain)
    from scipy.special import stdtrit

    variance = (len(folds) - 1) * float(np.var(folds))
    variance += float(np.var(runs, ddof=1)) / len(runs) if len(runs) > 1 else 0.0
    half = float(stdtrit(len(folds) - 1, (1 + CONFIDENCE) / 2)) * math.sqrt(variance)
    return ChangeRecord(gain=gain, interval=[gain - half, gain + half])
