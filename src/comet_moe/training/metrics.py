"""How good predictions are, from plain arrays."""

from typing import Any

import numpy as np
import numpy.typing as npt

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
