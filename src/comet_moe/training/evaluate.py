"""A model of a recipe on a split: losses, metrics of each task, and how its gates use the experts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comet_moe.checks import without_value_checks
from comet_moe.data import Dataset, Split
from comet_moe.models import Model, Task
from comet_moe.statistics import RoutingStatistics
from comet_moe.training.batches import evaluation_batches
from comet_moe.training.groups import GateGroups, Grouping, Groups
from comet_moe.training.records import (
    EvaluationRecord,
    GroupsRecord,
    Metrics,
    RoutingRecord,
    SummaryRecord,
)

EVALUATION_BATCH = 4096
"""Rows of a batch; not the training batch size, so that metrics do not depend on it."""


def evaluate_held_out(model: Model, dataset: Dataset) -> SummaryRecord:
    """Evaluate ``model`` on the validation and the test split."""
    return SummaryRecord.from_evaluations(
        evaluate(model, dataset.validation),
        evaluate(model, dataset.test, dataset.meta.get("groups", {})),
        test_split="test",
    )


@torch.no_grad()
@without_value_checks()  # NaN weights give a NaN loss, which ends the run with a reason, not with an error
def evaluate(model: Model, split: Split, groups: Groups | None = None) -> EvaluationRecord:
    """Evaluate ``model`` in eval mode on all rows of ``split``; its mode is restored afterwards.

    Args:
        model: the model.
        split: the rows.
        groups: columns by which the use of the experts is recorded, beside the class of each task; None
            records it by no column at all.
    """
    was_training = model.training
    model.eval()
    accumulators = [TaskMetrics(task) for task in model.tasks]
    statistics = {task.name: RoutingStatistics() for task in model.tasks}
    by_group = _gate_groups(model.tasks, split, groups)
    flops = start = 0
    for batch in evaluation_batches(split, EVALUATION_BATCH):
        outputs, routings = model(batch.features)
        flops += model.flops(routings)
        for metrics, output, routing in zip(accumulators, outputs, routings, strict=True):
            metrics.add(output, batch.targets)
            statistics[metrics.task.name].add(routing)
            if metrics.task.name in by_group:
                by_group[metrics.task.name].add(routing, start)
        start += len(batch)
    model.train(was_training)
    routing_records = {
        name: routing_record(sums, by_group[name].records() if name in by_group else {})
        for name, sums in statistics.items()
    }
    return EvaluationRecord(
        loss=100 * sum(metrics.task.weight * metrics.loss() for metrics in accumulators),
        tasks={metrics.task.name: metrics.metrics() for metrics in accumulators},
        experts_per_sample=float(np.mean([record.experts_per_sample for record in routing_records.values()])),
        flops_per_sample=flops / max(len(split), 1),
        routing=routing_records,
    )


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

    def add(self, output: Tensor, targets: dict[str, Tensor]) -> None:
        """Add one batch: outputs (B, outputs) of the head, and the targets by name."""
        loss_sum, count = self.task.loss(output.double(), targets)
        self._loss_sum += float(loss_sum)
        self._count += float(count)
        self._outputs.append(output.squeeze(-1))
        self._targets.append(targets[self.task.name])

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
