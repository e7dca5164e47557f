"""A model of a recipe on a split: losses, metrics of each task, and how its gates use the experts.

The evaluation on the test split also records what experts specialise in: the weight that each group of
samples gives to each expert. A grouping is a column of the data: the class of a task, or one that
``Dataset.meta["groups"]`` names. That maps the name of a feature or target to labels of its values 0, 1, ...
None in place of labels means that each value is its own label.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, get_args

import numpy as np
import torch

from comet_moe.checks import without_value_checks
from comet_moe.devices import Placement
from comet_moe.exceptions import DataError
from comet_moe.experiments.data import Dataset, Split
from comet_moe.experiments.models import Model, Task
from comet_moe.experiments.models.base import read_schema
from comet_moe.experiments.training.batches import evaluation_batches
from comet_moe.experiments.training.gain import measure_gain
from comet_moe.experiments.training.metrics import TaskMetrics
from comet_moe.experiments.training.records import (
    EvaluationRecord,
    GroupsRecord,
    RoutingRecord,
    SummaryRecord,
)
from comet_moe.kernels.mix import weights_dtype
from comet_moe.routing import Routing
from comet_moe.statistics import GroupStatistics, RoutingStatistics
from comet_moe.verdict import Problem, describe_numbers, explain

CPU = Placement()
EVALUATION_BATCH = 4096
"""Rows of a batch; not the training batch size, so that metrics do not depend on it."""

Groups = Mapping[str, Sequence[str] | None]
"""Names of columns, each with the labels of its values, or None."""

MAX_GROUPS = 30
"""Groups of a column, the largest ones; all others are one group, "other"."""


def evaluate_held_out(model: Model, dataset: Dataset, placement: Placement = CPU) -> SummaryRecord:
    """Evaluate ``model`` on the validation and the test split."""
    groups = dataset.meta.get("groups", {})
    test = _with_group_columns(dataset.test, dataset.meta)
    on_test = evaluate(model, test, groups, with_intervals=True, placement=placement)
    was_training = model.training
    gain = measure_gain(model.eval(), dataset.test, placement)
    model.train(was_training)
    return SummaryRecord.from_evaluations(
        evaluate(model, dataset.validation, placement=placement),
        on_test.model_copy(update={"gain": gain}),
        test_split="test",
    )


@torch.no_grad()
@without_value_checks()  # NaN weights give a NaN loss, which ends the run with a reason, not with an error
def evaluate(
    model: Model,
    split: Split,
    groups: Groups | None = None,
    with_intervals: bool = False,
    placement: Placement = CPU,
) -> EvaluationRecord:
    """Evaluate ``model`` in eval mode on all rows of ``split``; its mode is restored afterwards.

    Args:
        model: the model.
        split: the rows.
        groups: columns by which the use of the experts is recorded, beside the class of each task; None
            records it by no column at all.
        with_intervals: whether to compute confidence intervals, for the tasks of a table.
        placement: where the model is, and the precision to compute in.
    """
    was_training = model.training
    model.eval()
    accumulators = [TaskMetrics(task, model.has_table_metrics) for task in model.tasks]
    statistics = {name: RoutingStatistics() for name in model.gate_names}
    by_group = _gate_groups(model.tasks, split, groups)
    flops = start = 0
    for batch in evaluation_batches(split, EVALUATION_BATCH):
        with placement.autocast():
            outputs, routings = model(placement.move(batch.features))
        flops += model.flops(routings)
        for metrics, output in zip(accumulators, outputs, strict=True):
            metrics.add(output.to("cpu", weights_dtype(output.dtype)), batch)
        for name, routing in zip(model.gate_names, routings, strict=True):
            statistics[name].add(routing)
            if name in by_group:
                by_group[name].add(routing, start)
        start += len(batch)
    model.train(was_training)
    routing_records = {
        name: routing_record(sums, by_group[name].records() if name in by_group else {})
        for name, sums in statistics.items()
    }
    trained = model.trained_task_values()
    tasks = {
        metrics.task.name: {**metrics.metrics(), **trained.get(metrics.task.name, {})}
        for metrics in accumulators
    }
    return EvaluationRecord(
        loss=100 * sum(metrics.task.weight * metrics.loss() for metrics in accumulators),
        tasks=tasks,
        experts_per_sample=float(np.mean([record.experts_per_sample for record in routing_records.values()])),
        flops_per_sample=flops / max(len(split), 1),
        routing=routing_records,
        intervals={
            metrics.task.name: metrics.intervals()
            for metrics in accumulators
            if with_intervals and model.has_table_metrics
        },
    )


def routing_record(
    statistics: RoutingStatistics, groups: dict[str, GroupsRecord] | None = None
) -> RoutingRecord:
    """The statistics of a gate as they are written."""
    result = statistics.result()
    fields = {name: result[name] for name in RoutingRecord.model_fields if name != "groups"}
    return RoutingRecord(**fields, groups=groups or {})


def _with_group_columns(split: Split, meta: Mapping[str, Any]) -> Split:
    """``split`` with the columns of the option ``groups`` of a table as targets, to group statistics by."""
    if "table" not in meta or not meta.get("groups"):
        return split
    names = [feature.name for feature in read_schema(meta).of_kind("categorical")]
    codes = split.features["categorical"]
    return replace(
        split, targets=split.targets | {name: codes[:, names.index(name)] for name in meta["groups"]}
    )


class Grouping:
    """The group of every row of a split by one column.

    Args:
        name: name of the column, a feature or target of ``split``.
        split: the rows.
        labels: labels of the values 0, 1, ...; None if each value is its own label.

    Attributes:
        labels: labels of the groups in the order of their values; the last is "other" if some are pooled.
        groups: (N,) the group of each row, as a position in ``labels``.
    """

    def __init__(self, name: str, split: Split, labels: Sequence[str] | None = None):
        columns = {**split.features, **split.targets}
        if name not in columns or columns[name].ndim != 1:
            raise DataError(
                f"the data set groups its rows by {name!r}, which is none of its columns of single values: "
                f"{', '.join(key for key, column in columns.items() if column.ndim == 1) or 'none'}."
            )
        self.name = name
        # NaN, a missing class, is a value too.
        values, codes, counts = np.unique(columns[name], return_inverse=True, return_counts=True)
        largest = np.sort(np.argsort(-counts, kind="stable")[:MAX_GROUPS])
        self.labels = [_label(value, labels) for value in values[largest].tolist()]
        if len(values) > MAX_GROUPS:
            self.labels.append("other")
        positions = np.full(len(values), MAX_GROUPS)
        positions[largest] = np.arange(len(largest))
        self.groups = positions[codes]


def _label(value: object, labels: Sequence[str] | None) -> str:
    if value != value:
        return "missing"
    if labels is not None and isinstance(value, int | float) and 0 <= value < len(labels):
        return labels[int(value)]
    return f"{value:g}" if isinstance(value, float) else str(value)


class GateGroups:
    """The statistics of one gate by each of some groupings."""

    def __init__(self, groupings: Sequence[Grouping]):
        self._parts = [(grouping, GroupStatistics(len(grouping.labels))) for grouping in groupings]

    def add(self, routing: Routing, start: int) -> None:
        """Add the routing of the rows of the split from ``start`` on."""
        rows = routing.batch_shape[0]
        for grouping, statistics in self._parts:
            statistics.add(routing, torch.from_numpy(grouping.groups[start : start + rows]))

    def records(self) -> dict[str, GroupsRecord]:
        """By the name of the column."""
        return {
            grouping.name: GroupsRecord(labels=grouping.labels, **statistics.result())
            for grouping, statistics in self._parts
        }


def _gate_groups(tasks: Sequence[Task], split: Split, groups: Groups | None) -> dict[str, GateGroups]:
    """For each task, how its gate's statistics are grouped; a classification task by its class, too."""
    if groups is None or not len(split):
        return {}
    classes = {task.name: task.classes or None for task in tasks if task.kind in ("binary", "multiclass")}
    groupings = {name: Grouping(name, split, labels) for name, labels in {**classes, **groups}.items()}
    return {
        task.name: GateGroups([groupings[name] for name in groupings if name in groups or name == task.name])
        for task in tasks
    }


def routing_warnings(
    routing: Mapping[str, RoutingRecord], epoch: int, known: Collection[str] = ()
) -> dict[str, list[str]]:
    """One sentence about all gates that are static, and one about all that blend.

    Args:
        routing: the statistics of each gate on the validation split.
        epoch: the epoch after which they were taken.
        known: gates that there has been a warning about.

    Returns:
        The sentences, each with the names of its gates.
    """
    found: dict[str, list[str]] = {}
    for problem in get_args(Problem):
        gates = [name for name, record in routing.items() if record.verdict == problem and name not in known]
        if gates:
            numbers = _numbers([routing[name] for name in gates])
            found[f"after epoch {epoch}, {explain(problem, gates, numbers)}"] = gates
    return found


def _numbers(records: list[RoutingRecord]) -> str:
    """The numbers behind a verdict, as means over the gates."""
    names = ("information", "shared_experts", "experts_per_sample")
    means = {name: fmean(getattr(record, name) for record in records) for name in names}
    return describe_numbers(**means, num_choices=records[0].choices)
