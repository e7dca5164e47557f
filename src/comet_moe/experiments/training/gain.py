"""Does routing matter to a trained model? Its losses and metrics with other routes.

See :mod:`comet_moe.interventions`: samples exchange their routes, or all get the mean weights of their batch.
"""

import numpy as np
import torch
from torch import Tensor

from comet_moe.checks import without_value_checks
from comet_moe.devices import Placement
from comet_moe.experiments.data import Split
from comet_moe.experiments.models import Model
from comet_moe.experiments.training.batches import Batch, take_rows
from comet_moe.experiments.training.metrics import TaskMetrics
from comet_moe.experiments.training.records import GainRecord, Metrics
from comet_moe.interventions import Intervention, change_losses, summarise_gain
from comet_moe.kernels.mix import weights_dtype
from comet_moe.mixture.find import outermost_gates

REPEATS = 5
MAX_ROWS = 4096
"""Rows to measure on, evenly spaced; they are one batch, so that all of them exchange their routes."""


@torch.no_grad()
@without_value_checks()
def measure_gain(model: Model, split: Split, placement: Placement) -> GainRecord | None:
    """The routing gain of ``model``, which is in eval mode, on rows of ``split``; None without a mixture.

    Losses are times 100 and weighted over the tasks, as the model's own.
    """
    gates = [name for name, gate, _ in outermost_gates(model) if gate.num_experts > 1]
    if not gates or len(split) < 2:
        return None
    rows = np.unique(np.linspace(0, len(split) - 1, MAX_ROWS).astype(np.int64))
    batch = take_rows(split, rows)
    metrics: list[dict[str, Metrics]] = []

    def loss(model: Model, batch: Batch) -> Tensor:
        losses, found = _run(model, batch, placement)
        metrics.append(found)
        return losses

    before = loss(model, batch)

    def changes(kind: Intervention, repeats: int, names: list[str]) -> Tensor:
        return change_losses(model, [batch], loss, before, kind, repeats=repeats, gates=names)

    differences = changes("shuffle", REPEATS, gates)
    first, *changed = metrics
    names = model.gate_names if len(model.gate_names) == len(gates) else gates
    by_gate: dict[str, float | None] = {
        name: float(changes("shuffle", REPEATS, [gate]).mean())
        for name, gate in zip(names, gates, strict=True)
    }
    return GainRecord(
        **summarise_gain(differences),
        mean_routes=float(changes("mean", 1, gates).mean()),
        by_gate=by_gate,
        metrics={task: _mean_change(of, [run[task] for run in changed]) for task, of in first.items()},
        rows=len(rows),
    )


def _run(model: Model, batch: Batch, placement: Placement) -> tuple[Tensor, dict[str, Metrics]]:
    """The losses of the rows of ``batch``, (B,), whose mean is the loss; and the metrics of each task."""
    with placement.autocast():
        outputs, _ = model(placement.move(batch.features))
    total, metrics = torch.zeros(len(batch), dtype=torch.float64), {}
    for task, given in zip(model.tasks, outputs, strict=True):
        output = given.to("cpu", weights_dtype(given.dtype))
        total += 100 * task.weight * task.mean_row_losses(output, batch.targets).double()
        found = TaskMetrics(task, model.has_table_metrics)
        found.add(output, batch)
        metrics[task.name] = found.metrics()
    return total, metrics


def _mean_change(before: Metrics, after: list[Metrics]) -> Metrics:
    return {name: _mean([run[name] for run in after], value) for name, value in before.items()}


def _mean(values: list[float | None], before: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return None if before is None or not known else float(np.mean(known)) - before
