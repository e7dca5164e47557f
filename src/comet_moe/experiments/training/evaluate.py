"""A model of a recipe on a split: losses, metrics of each task, and how its gates use the experts.

The evaluation on the test split also records, for each group of samples, what experts specialise in and
whether routing matters.
"""

from collections.abc import Collection, Mapping
from statistics import fmean
from typing import get_args

import numpy as np
import torch

from comet_moe.checks import without_value_checks
from comet_moe.devices import Placement
from comet_moe.experiments.data import Dataset, Split
from comet_moe.experiments.models import Model
from comet_moe.experiments.training.batches import evaluation_batches
from comet_moe.experiments.training.gain import measure_gain
from comet_moe.experiments.training.groups import Groups, gate_groups, with_group_columns
from comet_moe.experiments.training.metrics import TaskMetrics, loss_resamples
from comet_moe.experiments.training.records import (
    EvaluationRecord,
    GroupsRecord,
    RoutingRecord,
    SummaryRecord,
)
from comet_moe.kernels.mix import weights_dtype
from comet_moe.statistics import RoutingStatistics
from comet_moe.verdict import Problem, describe_numbers, explain

CPU = Placement()
EVALUATION_BATCH = 4096
"""Rows of a batch; not the training batch size, so that metrics do not depend on it."""


def evaluate_held_out(
    model: Model, dataset: Dataset, placement: Placement = CPU, in_full: bool = True
) -> SummaryRecord:
    """Evaluate ``model`` on the validation and the test split.

    Without ``in_full``, what takes longest is left out: the intervals and the routing gain.
    """
    groups = dataset.meta.get("groups", {})
    test = with_group_columns(dataset.test, dataset.meta)
    on_test = evaluate(model, test, groups, with_intervals=in_full, placement=placement)
    was_training = model.training
    gain = measure_gain(model.eval(), test, placement, groups) if in_full else None
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
    by_group = gate_groups(model.tasks, split, groups)
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
    with_intervals = with_intervals and model.has_table_metrics
    return EvaluationRecord(
        loss=100 * sum(metrics.task.weight * metrics.loss() for metrics in accumulators),
        tasks=tasks,
        experts_per_sample=float(np.mean([record.experts_per_sample for record in routing_records.values()])),
        flops_per_sample=flops / max(len(split), 1),
        routing=routing_records,
        intervals={metrics.task.name: metrics.intervals() for metrics in accumulators if with_intervals},
        loss_resamples=loss_resamples(accumulators) if with_intervals else [],
        test_rows={
            metrics.task.name: metrics.rows()
            for metrics in accumulators
            if groups is not None and model.has_table_metrics
        },
    )


def routing_record(
    statistics: RoutingStatistics, groups: dict[str, GroupsRecord] | None = None
) -> RoutingRecord:
    """The statistics of a gate as they are written."""
    result = statistics.result()
    fields = {name: result[name] for name in RoutingRecord.model_fields if name != "groups"}
    return RoutingRecord(**fields, groups=groups or {})


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
