"""A model on a split: losses without penalties, task metrics, and how the experts are used.

How good predictions are, from plain arrays.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comet_moe.checks import without_value_checks
from comet_moe.data import Dataset, Split
from comet_moe.models import ImageModel, RatingModel, Task
from comet_moe.routing import Routing
from comet_moe.training.batches import slices

EVALUATION_BATCH = 4096
"""Rows at a time; a number of its own, so that a result does not depend on the training batch."""


def summary(model: RatingModel | ImageModel, dataset: Dataset) -> dict[str, Any]:
    """What a run reports of its best weights: losses of both held-out splits, the rest of the test split."""
    validation, test = evaluate(model, dataset.validation), evaluate(model, dataset.test)
    return {
        "validation_loss": validation["loss"],
        "test_loss": test["loss"],
        "experts_per_sample": test["experts_per_sample"],
        "flops_per_sample": test["flops_per_sample"],
        "tasks": test["tasks"],
        "usage": test["usage"],
    }


@torch.no_grad()
@without_value_checks()  # weights that are no numbers give a loss that is none, not an error
def evaluate(model: RatingModel | ImageModel, split: Split) -> dict[str, Any]:
    """Loss (times 100), each task's loss and metrics, experts per sample and expert usage. Plain data."""
    was_training = model.training
    model.eval()
    scores = [_TaskScore(task) for task in model.tasks]
    usages = [RoutingStatistics() for _ in model.tasks]
    flops = 0
    for batch in slices(split, EVALUATION_BATCH):
        outputs, routings = model(batch.features)
        flops += model.flops(routings)
        for score, usage, output, routing in zip(scores, usages, outputs, routings, strict=True):
            score.add(output, batch.targets)
            usage.add(routing)
    model.train(was_training)
    tasks = {score.task.name: score.result() for score in scores}
    used = {score.task.name: usage.result() for score, usage in zip(scores, usages, strict=True)}
    return {
        "loss": 100 * sum(score.task.weight * score.loss() for score in scores),
        "tasks": tasks,
        "flops_per_sample": flops / max(len(split), 1),
        "experts_per_sample": float(np.mean([usage["experts_per_sample"] for usage in used.values()])),
        "usage": used,
    }


class _TaskScore:
    """One task's loss and predictions, batch by batch."""

    def __init__(self, task: Task):
        self.task = task
        self._sum = 0.0
        self._count = 0.0
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []

    def add(self, output: Tensor, targets: dict[str, Tensor]) -> None:
        total, count = self.task.loss(output.double(), targets)
        self._sum += float(total)
        self._count += float(count)
        self._outputs.append(output.squeeze(-1))
        self._targets.append(targets[self.task.name])

    def loss(self) -> float:
        return self._sum / max(self._count, 1.0)

    def result(self) -> dict[str, float]:
        loss = self.loss()
        if self.task.kind == "value":
            return {"loss": loss, "mse": loss}
        outputs, targets = torch.cat(self._outputs).numpy(), torch.cat(self._targets).numpy()
        found = {"loss": loss, "accuracy": accuracy(outputs, targets)}
        return found | {"auc": auc(outputs, targets)} if self.task.kind == "binary" else found


class RoutingStatistics:
    """Routing statistics of one gate over many batches, weighted by samples."""

    _MEANS = (
        "experts_per_sample",
        "share_of_samples",
        "share_of_weight",
        "tree_entropy",
        "one_hot_trees",
        "leaf_share",
    )

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._samples = 0

    def add(self, routing: Routing) -> None:
        """Take in one batch."""
        statistics = routing.statistics()
        samples = statistics["samples"]
        self._samples += samples
        for name in self._MEANS:
            if statistics[name] is not None:
                self._sums[name] = self._sums.get(name, 0) + samples * np.asarray(statistics[name])

    def result(self) -> dict[str, Any]:
        """The means over samples, and the experts that none selected."""
        means = {name: (total / max(self._samples, 1)).tolist() for name, total in self._sums.items()}
        shares: Sequence[float] = means.get("share_of_samples", ())
        return means | {"dead_experts": [expert for expert, share in enumerate(shares) if share == 0]}


Array = npt.NDArray[Any]


def auc(scores: Array, labels: Array) -> float:
    """Area under the ROC curve, ties counted half (Mann-Whitney); NaN where one class is missing."""
    positive = labels.astype(bool)
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        return float("nan")
    _, place, ties = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (ties.cumsum() - (ties - 1) / 2)[place]  # ties share their mean rank
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * others))


def accuracy(logits: Array, labels: Array) -> float:
    """Share of rows that are right: (N,) logits of a yes, or (N, classes)."""
    chosen = logits > 0 if logits.ndim == 1 else logits.argmax(-1)
    return float(np.mean(chosen == labels)) if len(labels) else float("nan")
