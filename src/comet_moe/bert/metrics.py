"""How good predicted classes are, from plain arrays."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def class_metrics(names: tuple[str, ...], predicted: Array, labels: Array) -> dict[str, float]:
    """The metrics called ``names``, in their order."""
    return {name: _METRICS[name](predicted, labels) for name in names}


def accuracy(predicted: Array, labels: Array) -> float:
    """Share of rows that are right."""
    return float(np.mean(predicted == labels)) if len(labels) else float("nan")


def f1(predicted: Array, labels: Array) -> float:
    """2PR / (P + R) of class 1; 0 where no row is right about it."""
    hits = float(np.sum((predicted == 1) & (labels == 1)))
    found = float(np.sum(predicted == 1) + np.sum(labels == 1))
    return 2 * hits / found if found else 0.0


def matthews(predicted: Array, labels: Array) -> float:
    """Correlation of two classes, -1..1; 0 where one side has a single class."""
    yes, no = predicted == 1, predicted != 1
    tp, fp = float(np.sum(yes & (labels == 1))), float(np.sum(yes & (labels != 1)))
    fn, tn = float(np.sum(no & (labels == 1))), float(np.sum(no & (labels != 1)))
    scale = ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    return (tp * tn - fp * fn) / scale if scale else 0.0


_METRICS = {"accuracy": accuracy, "f1": f1, "matthews": matthews}
