"""A model of a recipe on a split: losses, metrics of each task, and how its gates use the experts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comet_moe.checks import without_value_checks
from comet_moe.devices import Placement
from comet_moe.experiments.data import Dataset, Split
from comet_moe.experiments.models import Model, TableModel, Task
from comet_moe.experiments.training.batches import Batch, evaluation_batches
from comet_moe.experiments.training.groups import GateGroups, Grouping, Groups
from comet_moe.experiments.training.records import (
    EvaluationRecord,
    GroupsRecord,
    Metrics,
    RoutingRecord,
    SummaryRecord,
)
from comet_moe.experiments.training.table_metrics import (
    Metric,
    bootstrap_intervals,
    compute_metrics,
    table_metrics,
)
from comet_moe.experiments.training.table_parts import with_group_columns
from comet_moe.kernels.mix import weights_dtype
from comet_moe.statistics import RoutingStatistics

CPU = Placement()
EVALUATION_BATCH = 4096
"""Rows of a batch; not the training batch size, so that metrics do not depend on it."""


def evaluate_held_out(model: Model, dataset: Dataset, placement: Placement = CPU) -> SummaryRecord:
    """Evaluate ``model`` on the validation and the test split."""
    groups = dataset.meta.get("groups", {})
    test = with_group_columns(dataset.test, dataset.meta)
    return SummaryRecord.from_evaluations(
        evaluate(model, dataset.validation, placement=placement),
        evaluate(model, test, groups, with_intervals=True, placement=placement),
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
    is_table = isinstance(model, TableModel)
    accumulators = [TableTaskMetrics(task) if is_table else TaskMetrics(task) for task in model.tasks]
    names = gate_names(model)
    statistics = {name: RoutingStatistics() for name in names}
    by_group = _gate_groups(model.tasks, split, groups)
    flops = start = 0
    for batch in evaluation_batches(split, EVALUATION_BATCH):
        with placement.autocast():
            outputs, routings = model(placement.move(batch.features))
        flops += model.flops(routings)
        for metrics, output in zip(accumulators, outputs, strict=True):
            metrics.add(output.to("cpu", weights_dtype(output.dtype)), batch)
        for name, routing in zip(names, routings, strict=True):
            statistics[name].add(routing)
            if name in by_group:
                by_group[name].add(routing, start)
        start += len(batch)
    model.train(was_training)
    routing_records = {
        name: routing_record(sums, by_group[name].records() if name in by_group else {})
        for name, sums in statistics.items()
    }
    tasks = {metrics.task.name: metrics.metrics() for metrics in accumulators}
    if isinstance(model, TableModel) and model.log_variances is not None:
        for name, value in zip(tasks, model.log_variances.tolist(), strict=True):
            tasks[name]["log_variance"] = value
    return EvaluationRecord(
        loss=100 * sum(metrics.task.weight * metrics.loss() for metrics in accumulators),
        tasks=tasks,
        experts_per_sample=float(np.mean([record.experts_per_sample for record in routing_records.values()])),
        flops_per_sample=flops / max(len(split), 1),
        routing=routing_records,
        intervals={
            metrics.task.name: metrics.intervals()
            for metrics in accumulators
            if with_intervals and isinstance(metrics, TableTaskMetrics)
        },
    )


def gate_names(model: Model) -> tuple[str, ...]:
    """The names of a model's gates, in the order of their routings; the gate of a task is named after it."""
    return model.gate_names if isinstance(model, TableModel) else tuple(task.name for task in model.tasks)


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


def routing_record(
    statistics: RoutingStatistics, groups: dict[str, GroupsRecord] | None = None
) -> RoutingRecord:
    """The statistics of a gate as they are written."""
    result = statistics.result()
    fields = {name: result[name] for name in RoutingRecord.model_fields if name != "groups"}
    return RoutingRecord(**fields, groups=groups or {})


class TaskMetrics:
    """Accumulates loss and predictions of one task over batches."""

    def __init__(self, task: Task):
        self.task = task
        self._loss_sum = 0.0
        self._count = 0.0
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []

    def add(self, output: Tensor, batch: Batch) -> None:
        """Add one batch: outputs (B, outputs) of the head."""
        loss_sum, count = self.task.loss(output.double(), batch.targets)
        self._loss_sum += float(loss_sum)
        self._count += float(count)
        self._outputs.append(output.squeeze(-1))
        self._targets.append(batch.targets[self.task.name])

    def loss(self) -> float:
        """Mean over the rows that count."""
        return self._loss_sum / max(self._count, 1.0)

    def metrics(self) -> Metrics:
        """The loss and the metrics of the task's kind."""
        loss = self.loss()
        if self.task.kind == "regression":
            return {"loss": loss, "mse": loss}
        outputs, targets = torch.cat(self._outputs).numpy(), torch.cat(self._targets).numpy()
        metrics: Metrics = {"loss": loss, "accuracy": accuracy(outputs, targets)}
        return metrics | {"auc": auc(outputs, targets)} if self.task.kind == "binary" else metrics


class TableTaskMetrics(TaskMetrics):
    """Also keeps the groups of the rows; the metrics are those of :mod:`table_metrics`."""

    def __init__(self, task: Task):
        super().__init__(task)
        self._groups: list[Tensor] = []

    def add(self, output: Tensor, batch: Batch) -> None:
        """Add one batch: outputs (B, outputs) of the head."""
        super().add(output, batch)
        if "group" in batch.features:
            self._groups.append(batch.features["group"])

    def metrics(self) -> Metrics:
        """The loss and the metrics of the task's kind."""
        return {"loss": self.loss()} | compute_metrics(*self._prepared())

    def intervals(self) -> dict[str, list[float | None]]:
        """The interval of each metric, by a bootstrap over rows."""
        return bootstrap_intervals(*self._prepared())

    def _prepared(self) -> tuple[dict[str, Metric], int]:
        """The metrics of the rows that have a target, and the number of those rows."""
        outputs, targets = torch.cat(self._outputs).numpy(), torch.cat(self._targets).numpy()
        is_present = ~np.isnan(targets)
        groups = torch.cat(self._groups).numpy()[is_present] if self._groups else None
        metrics = table_metrics(self.task, outputs[is_present], targets[is_present], groups)
        return metrics, int(is_present.sum())


def auc(scores: npt.NDArray[Any], labels: npt.NDArray[Any]) -> float:
    """Area under the ROC curve, (N,) and (N,) of 0 and 1; NaN where a class is missing or a score is NaN."""
    from sklearn.metrics import roc_auc_score

    if len(np.unique(labels)) < 2 or not np.isfinite(scores).all():
        return float("nan")
    return float(roc_auc_score(labels, scores))


def accuracy(logits: npt.NDArray[Any], labels: npt.NDArray[Any]) -> float:
    """Share of rows whose class is right, from (N,) logits of class 1 or (N, classes); NaN without rows."""
    from sklearn.metrics import accuracy_score

    if not len(labels):
        return float("nan")
    return float(accuracy_score(labels, logits > 0 if logits.ndim == 1 else logits.argmax(-1)))
