"""How good predictions are, from plain arrays."""

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

Array = npt.NDArray[Any]


def auc(scores: Array, labels: Array) -> float:
    """Area under the ROC curve, ties counted half (Mann-Whitney); NaN where one class is missing."""
    positive = labels.astype(bool)
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        return float("nan")
    ranks = rankdata(scores)
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * others))


def accuracy(logits: Array, labels: Array) -> float:
    """Share of rows that are right: (N,) logits of a yes, or (N, classes)."""
    chosen = logits > 0 if logits.ndim == 1 else logits.argmax(-1)
    return float(np.mean(chosen == labels)) if len(labels) else float("nan")
