"""Means with standard errors, one-sided t-tests of two means, and the metrics of trials.

The t-tests take means and standard errors, so that they can also be computed from what a paper prints.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan, sqrt
from statistics import fmean
from typing import Any

import numpy as np
from scipy.stats import ttest_ind_from_stats

SIGNIFICANCE_LEVEL = 0.05


@dataclass(frozen=True)
class Summary:
    """Mean and standard error of ``count`` numbers.

    se = sd / sqrt(count), sd² = Σ (x - mean)² / (count - 1); None for one number.
    """

    mean: float
    se: float | None
    count: int


def summarise(values: Sequence[float]) -> Summary | None:
    """Mean and standard error of ``values``; None if there are none."""
    if len(values) == 0:
        return None
    sample = np.asarray(values, dtype=float)
    if np.ptp(sample) == 0:  # exactly, where rounding in the mean would leave a deviation of 1e-17
        return Summary(float(sample[0]), None if len(sample) == 1 else 0.0, len(sample))
    return Summary(float(sample.mean()), float(sample.std(ddof=1) / sqrt(len(sample))), len(sample))


def mean_and_se(name: str, summary: Summary | None) -> dict[str, float | None]:
    """``summary`` as the fields ``NAME_mean`` and ``NAME_se`` of a row."""
    mean, se = (None, None) if summary is None else (summary.mean, summary.se)
    return {f"{name}_mean": mean, f"{name}_se": se}


def student_t_test(lower: Summary, upper: Summary) -> float | None:
    """One-sided p-value that the mean of ``lower`` is below that of ``upper``, for equal variances.

    t = (m1 - m2) / (s sqrt(1/n1 + 1/n2)), s² = ((n1-1) s1² + (n2-1) s2²) / (n1+n2-2), n1+n2-2 degrees of
    freedom. None if a sample has fewer than two numbers, or if neither varies.
    """
    return _p_value(lower, upper, equal_var=True)


def welch_t_test(lower: Summary, upper: Summary) -> float | None:
    """One-sided p-value that the mean of ``lower`` is below that of ``upper``, for unequal variances.

    t = (m1 - m2) / sqrt(e1² + e2²) with the standard errors e, and (e1² + e2²)² / (e1⁴/(n1-1) + e2⁴/(n2-1))
    degrees of freedom. None if a sample has fewer than two numbers, or if neither varies.
    """
    return _p_value(lower, upper, equal_var=False)


def is_significant(p: float | None) -> bool | None:
    """Whether ``p`` is below 0.05; None for None."""
    return None if p is None else p < SIGNIFICANCE_LEVEL


def _p_value(lower: Summary, upper: Summary, equal_var: bool) -> float | None:
    if lower.se is None or upper.se is None or lower.se == upper.se == 0:
        return None
    result = ttest_ind_from_stats(
        lower.mean,
        lower.se * sqrt(lower.count),
        lower.count,
        upper.mean,
        upper.se * sqrt(upper.count),
        upper.count,
        equal_var=equal_var,
        alternative="less",
    )
    return float(result.pvalue)


Tasks = Mapping[str, Mapping[str, float | None]]
"""The metrics of one trial by task and name."""


def summarise_metrics(trials: Iterable[Tasks]) -> dict[str, dict[str, float | None]]:
    """``mean`` and ``se`` of every metric over the trials, named ``task.metric``.

    A metric that several tasks share is also there as ``metric``: each trial's plain mean over the tasks. The
    loss is not, as the tasks have weights in it. A trial in which a metric does not exist (the AUC of one
    class) does not count in it.
    """
    values: dict[str, list[float]] = {}
    for tasks in trials:
        for name, value in _named_metrics(tasks):
            values.setdefault(name, []).extend([value] if isfinite(value) else [])
    summaries = {name: summary for name, sample in values.items() if (summary := summarise(sample))}
    return {name: {"mean": summary.mean, "se": summary.se} for name, summary in summaries.items()}


def _named_metrics(tasks: Tasks) -> Iterator[tuple[str, float]]:
    over_tasks: dict[str, list[float]] = {}
    for task, metrics in tasks.items():
        for metric, value in metrics.items():
            over_tasks.setdefault(metric, []).append(nan if value is None else value)
            yield f"{task}.{metric}", over_tasks[metric][-1]
    for metric, shared in over_tasks.items():
        if len(shared) > 1 and metric != "loss":
            yield metric, fmean(shared)


def select_task_means(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """One entry per metric, without the losses, from entries that are named as in `summarise_metrics`.

    The mean over tasks where several tasks share a metric, else the entry of its only task.
    """
    selected = {name.rpartition(".")[2]: value for name, value in metrics.items() if "." in name}
    selected |= {name: value for name, value in metrics.items() if "." not in name}
    return {name: value for name, value in selected.items() if name != "loss"}
