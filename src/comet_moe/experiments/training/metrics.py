"""Metrics of tasks from the outputs of a model over batches; for tables with confidence intervals.

Every metric is a function of weights of the rows. With all weights 1 it is the metric itself. With
the numbers of times that each row was drawn it is that of a bootstrap sample. What does not depend on the
weights, such as the order of the scores, is computed once.

Shapes: N rows with a target, K classes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import log_softmax
from torch import Tensor

from comet_moe.experiments.models import Task
from comet_moe.experiments.training.batches import Batch
from comet_moe.experiments.training.records import Metrics

Floats = npt.NDArray[np.float64]
Metric = Callable[[Floats], float]
"""From weights (N,) of the rows to the metric; NaN where it is not defined."""

BOOTSTRAP_SAMPLES = (50, 200)
"""Fewest and most samples; between them as many as make 20 million draws of rows."""
BOOTSTRAP_DRAWS = 20_000_000
CONFIDENCE = 0.95
CALIBRATION_BINS = 15


class TaskMetrics:
    """Accumulates loss and predictions of one task over batches.

    Args:
        task: the task.
        of_table: whether it is of a table, with all of :func:`table_metrics`. Other tasks have the accuracy,
            and the AUC of two classes; the squared error of a regression is its loss.
    """

    def __init__(self, task: Task, of_table: bool = True):
        self.task = task
        self._of_table = of_table
        self._losses: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._groups: list[Tensor] = []

    def add(self, output: Tensor, batch: Batch) -> None:
        """Add one batch: outputs (B, outputs) of the head."""
        losses, counts = self.task.row_losses(output.double(), batch.targets)
        self._losses.append(losses)
        self._counts.append(counts)
        self._outputs.append(output.squeeze(-1))
        self._targets.append(batch.targets[self.task.name])
        if "group" in batch.features:
            self._groups.append(batch.features["group"])

    def loss(self) -> float:
        """Mean over the rows that count."""
        total, count = (sum(float(batch.sum()) for batch in parts) for parts in (self._losses, self._counts))
        return total / max(count, 1.0)

    def row_losses(self) -> tuple[Floats, Floats]:
        """The loss of each row times its weight, and the weight, 0 where it has no target: (N,), (N,)."""
        losses, counts = (torch.cat(parts).double().numpy() for parts in (self._losses, self._counts))
        return losses, counts

    def rows(self) -> list[int]:
        """Number of rows that have a target: of each class, or of all for a number."""
        targets = torch.cat(self._targets).numpy()
        present = targets[~np.isnan(targets)]
        if not self.task.has_classes:
            return [len(present)]
        return np.bincount(present.astype(np.int64), minlength=max(self.task.outputs, 2)).tolist()

    def metrics(self) -> Metrics:
        """The loss and the metrics of the task's kind."""
        loss = self.loss()
        if not self._of_table and self.task.kind == "regression":
            return {"loss": loss, "mse": loss}
        metrics, rows = self._prepared()
        if not self._of_table:
            metrics = {name: metrics[name] for name in ("accuracy", "auc") if name in metrics}
        return {"loss": loss} | compute_metrics(metrics, rows)

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


def table_metrics(
    task: Task, outputs: npt.NDArray[Any], targets: npt.NDArray[Any], groups: npt.NDArray[Any] | None
) -> dict[str, Metric]:
    """The metrics of a task, by name.

    Args:
        task: the task.
        outputs: (N,) or (N, K), of the head.
        targets: (N,) without missing ones; standardised for a regression.
        groups: (N,) groups of the rows for the grouped AUC, or None.

    Returns:
        log_loss, accuracy, f1, calibration_error and, for two classes, auc and gauc; or, in the units of the
        data, mse, mae and r2.
    """
    outputs, targets = outputs.astype(np.float64), targets.astype(np.float64)
    if task.kind in ("regression", "count"):
        scale, shift = (task.std, task.mean) if task.kind == "regression" else (1.0, 0.0)
        predicted = np.exp(outputs) if task.kind == "count" else outputs * scale + shift
        return _number_metrics(predicted, targets * scale + shift)
    logits = outputs if task.kind == "multiclass" else np.stack((np.zeros_like(outputs), outputs), 1)
    with np.errstate(invalid="ignore"):  # infinite logits have no probability
        metrics = _class_metrics(log_softmax(logits, 1), targets.astype(np.int64))
    if task.kind == "multiclass":
        return metrics
    metrics["auc"] = weighted_auc(outputs, targets, np.zeros(len(targets), dtype=np.int64))
    if groups is not None:
        metrics["gauc"] = weighted_auc(outputs, targets, groups)
    return metrics


def compute_metrics(metrics: dict[str, Metric], rows: int) -> Metrics:
    """The value of each metric."""
    weights = np.ones(rows)
    return {name: metric(weights) for name, metric in metrics.items()}


def bootstrap_intervals(
    metrics: dict[str, Metric], rows: int, seed: int = 0
) -> dict[str, list[float | None]]:
    """Percentile intervals of each metric at 95 % confidence: [low, high], from samples of rows.

    The same seed gives all tasks and models the same samples, so that intervals of differences are possible.
    """
    values: dict[str, list[float]] = {name: [] for name in metrics}
    for weights in _bootstrap_weights(rows, seed):
        for name, metric in metrics.items():
            values[name].append(metric(weights))
    tail = (1 - CONFIDENCE) / 2
    return {name: _quantiles(of_metric, [tail, 1 - tail]) for name, of_metric in values.items()}


def loss_resamples(tasks: Sequence[TaskMetrics], seed: int = 0) -> list[float | None]:
    """The loss, weighted over ``tasks`` and times 100, of samples of the rows.

    All models on the same rows get the same samples. The spread of the difference of two losses is then that
    of the differences of their entries.
    """
    weights = [100 * metrics.task.weight for metrics in tasks]
    losses, counts = (np.stack(parts, 1) for parts in zip(*(of.row_losses() for of in tasks), strict=True))
    return [
        float(f"{weights @ (drawn @ losses / np.maximum(drawn @ counts, 1.0)):.7g}")
        for drawn in _bootstrap_weights(len(losses), seed)
    ]


def _bootstrap_weights(rows: int, seed: int) -> Iterator[Floats]:
    """How often each of the rows is drawn, (rows,), for each sample of the bootstrap."""
    rng = np.random.default_rng(seed)
    fewest, most = BOOTSTRAP_SAMPLES
    samples = min(max(BOOTSTRAP_DRAWS // max(rows, 1), fewest), most)
    for _ in range(samples if rows else 0):
        yield np.bincount(rng.integers(0, rows, rows), minlength=rows).astype(np.float64)


def _quantiles(values: list[float], levels: list[float]) -> list[float | None]:
    finite = np.array([value for value in values if np.isfinite(value)])
    return [float(value) for value in np.quantile(finite, levels)] if len(finite) else [None, None]


def _mean(values: Floats) -> Metric:
    return lambda weights: float(weights @ values / weights.sum()) if weights.sum() else float("nan")


def _number_metrics(predicted: Floats, target: Floats) -> dict[str, Metric]:
    errors = (predicted - target) ** 2

    def r2(weights: Floats) -> float:
        total = weights.sum()
        spread = weights @ (target - weights @ target / total) ** 2 if total else 0.0
        return float(1 - weights @ errors / spread) if spread > 0 else float("nan")

    return {"mse": _mean(errors), "mae": _mean(np.abs(predicted - target)), "r2": r2}


def _class_metrics(log_probabilities: Floats, target: npt.NDArray[np.int64]) -> dict[str, Metric]:
    """Of (N, K) logarithms, which tell how sure a wrong class was where a probability would round to 1."""
    rows, classes = log_probabilities.shape
    probabilities = np.exp(log_probabilities)
    predicted = probabilities.argmax(1)
    is_right = (predicted == target).astype(np.float64)
    confidence = probabilities[:, 1] if classes == 2 else probabilities.max(1)
    outcome = target.astype(np.float64) if classes == 2 else is_right
    return {
        "log_loss": _mean(-log_probabilities[np.arange(rows), target]),
        "accuracy": _mean(is_right),
        "f1": _f1(predicted, target, classes),
        "calibration_error": _calibration_error(confidence, outcome),
    }


def _f1(predicted: npt.NDArray[np.int64], target: npt.NDArray[np.int64], classes: int) -> Metric:
    """F1 of class 1 for two classes, else the mean over the classes that occur."""

    def f1(weights: Floats) -> float:
        right = np.bincount(target, weights * (predicted == target), minlength=classes)
        total = np.bincount(target, weights, minlength=classes)
        total += np.bincount(predicted, weights, minlength=classes)
        if classes == 2:
            return float(2 * right[1] / total[1]) if total[1] else 0.0
        occurs = total > 0
        return float((2 * right[occurs] / total[occurs]).mean()) if occurs.any() else float("nan")

    return f1


def _calibration_error(confidence: Floats, outcome: Floats) -> Metric:
    """Expected calibration error: Σ_b share_b · |mean confidence - mean outcome| over bins of equal width."""
    bins = np.minimum((np.nan_to_num(confidence) * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
    gap = confidence - outcome

    def error(weights: Floats) -> float:
        total = weights.sum()
        by_bin = np.bincount(bins, weights * gap, minlength=CALIBRATION_BINS)
        return float(np.abs(by_bin).sum() / total) if total else float("nan")

    return error


def weighted_auc(scores: Floats, labels: Floats, groups: npt.NDArray[Any]) -> Metric:
    """Mean over groups of the area under the ROC curve, each group counting by the weight of its rows.

    A group whose rows have one class only does not count. With one group this is the AUC.

    Args:
        scores, labels: (N,), labels of 0 and 1.
        groups: (N,) of any numbers.
    """
    if not np.isfinite(scores).all():
        return lambda weights: float("nan")
    _, group = np.unique(groups, return_inverse=True)
    order = np.lexsort((scores, group))
    group, sorted_scores, is_positive = group[order], scores[order], labels[order] == 1
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (group[1:] != group[:-1]) | (sorted_scores[1:] != sorted_scores[:-1])
    tie = np.cumsum(is_new) - 1  # rows of a group with the same score
    group_of_tie = group[is_new]
    first_tie = np.searchsorted(group_of_tie, np.arange(group_of_tie[-1] + 1 if len(order) else 0))

    def auc(weights: Floats) -> float:
        weights = weights[order]
        positive = np.bincount(tie, weights * is_positive)
        negative = np.bincount(tie, weights * ~is_positive)
        below = np.cumsum(negative) - negative
        below = below - below[first_tie][group_of_tie]
        wins = np.bincount(group_of_tie, positive * (below + negative / 2))
        positives, negatives = np.bincount(group_of_tie, positive), np.bincount(group_of_tie, negative)
        counts = (positives > 0) & (negatives > 0)
        if not counts.any():
            return float("nan")
        sizes = (positives + negatives)[counts]
        return float((wins[counts] / (positives * negatives)[counts]) @ sizes / sizes.sum())

    return auc if len(order) else lambda weights: float("nan")
