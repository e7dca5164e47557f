"""Unpaired one-sided t-tests, from samples or from what a paper prints of them.

What the tasks of trials were judged by: AUC, accuracy, MSE.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, nan, sqrt
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import ttest_ind_from_stats

LEVEL = 0.05


@dataclass(frozen=True)
class Summary:
    """A sample of ``count`` numbers: their mean and its standard error.

    se = sd / sqrt(count), sd² = Σ (x - mean)² / (count - 1). With one number there is no ``se``.
    """

    mean: float
    se: float | None
    count: int


def summarise(values: Sequence[float]) -> Summary | None:
    """Mean and standard error of ``values``; None if there are none."""
    if len(values) == 0:
        return None
    sample = np.asarray(values, dtype=float)
    if len(sample) == 1:
        return Summary(float(sample[0]), None, 1)
    if np.ptp(sample) == 0:  # exactly, where rounding in the mean would leave a deviation of 1e-17
        return Summary(float(sample[0]), 0.0, len(sample))
    return Summary(float(sample.mean()), float(sample.std(ddof=1) / sqrt(len(sample))), len(sample))


def student(lower: Summary, upper: Summary) -> float | None:
    """p-value of "the mean of ``lower`` is not below that of ``upper``", both of the same variance.

    t = (m1 - m2) / (s sqrt(1/n1 + 1/n2)), s² = ((n1-1) s1² + (n2-1) s2²) / (n1+n2-2), n1+n2-2 degrees of
    freedom. None where a sample has fewer than two numbers, or where neither varies.
    """
    return _p_value(lower, upper, equal_var=True)


def welch(lower: Summary, upper: Summary) -> float | None:
    """p-value of "the mean of ``lower`` is not below that of ``upper``", each of its own variance.

    t = (m1 - m2) / sqrt(e1² + e2²) with the standard errors e, and (e1² + e2²)² / (e1⁴/(n1-1) + e2⁴/(n2-1))
    degrees of freedom. None where a sample has fewer than two numbers, or where neither varies.
    """
    return _p_value(lower, upper, equal_var=False)


def is_significant(p: float | None) -> bool | None:
    """Whether ``p`` is below 0.05; None if there is none."""
    return None if p is None else p < LEVEL


def _p_value(lower: Summary, upper: Summary, equal_var: bool) -> float | None:
    if lower.se is None or upper.se is None or lower.se == upper.se == 0:
        return None
    tested = ttest_ind_from_stats(
        lower.mean,
        lower.se * sqrt(lower.count),
        lower.count,
        upper.mean,
        upper.se * sqrt(upper.count),
        upper.count,
        equal_var=equal_var,
        alternative="less",
    )
    return float(tested.pvalue)


def metric_summaries(trials: pd.DataFrame) -> dict[str, Summary]:
    """Mean and standard error of every metric over ``trials``, named ``task.metric``.

    A metric that several tasks share is there a second time, as ``metric``: each trial's plain mean over the
    tasks, but for the loss, in which tasks have weights. A trial in which a metric does not exist (the AUC of
    one class) does not count in it.
    """
    values: dict[str, list[float]] = {}
    for tasks in trials["tasks"]:
        for name, value in _values(tasks):
            values.setdefault(name, []).extend([value] if isfinite(value) else [])
    return {name: found for name, sample in values.items() if (found := summarise(sample))}


def _values(tasks: dict[str, dict[str, float | None]]) -> Iterator[tuple[str, float]]:
    over_tasks: dict[str, list[float]] = {}
    for task, metrics in tasks.items():
        for metric, value in metrics.items():
            over_tasks.setdefault(metric, []).append(nan if value is None else value)
            yield f"{task}.{metric}", over_tasks[metric][-1]
    for metric, shared in over_tasks.items():
        if len(shared) > 1 and metric != "loss":
            yield metric, fmean(shared)


def by_metric(metrics: dict[str, Any]) -> dict[str, Any]:
    """Of entries named as above one a metric, losses left out: the mean over tasks, or its only task's."""
    found = {name.rpartition(".")[2]: value for name, value in metrics.items() if "." in name}
    found |= {name: value for name, value in metrics.items() if "." not in name}
    return {name: value for name, value in found.items() if name != "loss"}
