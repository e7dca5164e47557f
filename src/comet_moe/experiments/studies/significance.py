"""Means with standard errors, one-sided t-tests of two means, and the metrics of trials.

The t-tests take means and standard errors, so that they can also be computed from what a paper prints. The
mean and its error are over seeds. How much a difference depends on the choice of test rows is one more error.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan, sqrt
from statistics import fmean
from typing import Any

import numpy as np
from scipy.special import stdtr

SIGNIFICANCE_LEVEL = 0.05
ROWS_FREEDOM = 49
"""Degrees of freedom of an error over test rows: at least 50 samples of them are drawn."""


@dataclass(frozen=True)
class Summary:
    """Mean and standard error of ``count`` numbers.

    se = sd / sqrt(count), sd² = Σ (x - mean)² / (count - 1); None for one number. ``freedom`` are the degrees
    of freedom of an error that was not computed so; None for count - 1.
    """

    mean: float
    se: float | None
    count: int
    freedom: float | None = None

    @property
    def degrees(self) -> float:
        """Degrees of freedom of the standard error."""
        return self.count - 1 if self.freedom is None else self.freedom


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


def welch_t_test(lower: Summary, upper: Summary, rows_error: float | None = None) -> float | None:
    """One-sided p-value of a test whether ``lower`` beats the mean of ``upper``, for unequal variances.

    t = (m1 - m2) / sqrt(e1² + e2² + r²) with the standard errors e over seeds, and r = ``rows_error`` of the
    difference over test rows. It has (Σ e²)² / Σ (e⁴/d) degrees of freedom, where d = count - 1 for the seeds
    and 49 for the rows. None if a sample has fewer than two numbers, or if nothing varies.
    """
    if lower.se is None or upper.se is None:
        return None
    terms = [(lower.se, lower.degrees), (upper.se, upper.degrees), (rows_error or 0.0, ROWS_FREEDOM)]
    error, degrees = _combine(terms)
    return float(stdtr(degrees, (lower.mean - upper.mean) / error)) if error else None


def difference_error(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Standard error of the difference of two losses over test rows, from their losses on the same samples.

    None where they were not recorded, or on other samples.
    """
    if len(first) < 2 or len(first) != len(second):
        return None
    return float(np.std(np.subtract(first, second), ddof=1))


def interpolate(first: Summary, second: Summary, share: float) -> Summary:
    """(1 - share) · first + share · second, two independent means."""
    mean = (1 - share) * first.mean + share * second.mean
    if first.se is None or second.se is None:
        return Summary(mean, None, 1)
    terms = [((1 - share) * first.se, first.degrees), (share * second.se, second.degrees)]
    error, degrees = _combine(terms)
    return Summary(mean, error, min(first.count, second.count), degrees)


def _combine(terms: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The standard error of a sum of independent terms, each with its own, and its degrees of freedom."""
    if not any(error for error, _ in terms):
        return 0.0, inf
    squares = [(error**2, degrees) for error, degrees in terms if error > 0]
    variance = sum(square for square, _ in squares)
    spread = sum(square**2 / degrees for square, degrees in squares)
    return sqrt(variance), variance**2 / spread if spread else inf


def correct_p_values(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction: the i-th smallest of m p-values, from 0, times m - i, and not below the one before.

    The chance that any of them is below 0.05 where nothing is to be found is then at most 0.05.
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        corrected[name] = largest
    return corrected


def is_significant(p: float | None) -> bool | None:
    """Whether ``p`` is below 0.05; None for None."""
    return None if p is None else p < SIGNIFICANCE_LEVEL


Tasks = Mapping[str, Mapping[str, float | None]]
"""The metrics of one trial by task and name."""


def summarise_metrics(trials: Iterable[Tasks]) -> dict[str, dict[str, float | None]]:
    """``mean`` and ``se`` of every metric over the trials, named ``task.metric``.

    A metric that several tasks share is also there as ``metric``: each trial's plain mean over the tasks in
    which it exists. The AUC of test rows of one class does not. The loss is not there, as the tasks have
    weights in it.
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
        known = [value for value in shared if isfinite(value)]
        if len(shared) > 1 and known and metric != "loss":
            yield metric, fmean(known)


def select_task_means(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """One entry per metric, without the losses, from entries that are named as in `summarise_metrics`.

    The mean over tasks where several tasks share a metric, else the entry of its only task.
    """
    selected = {name.rpartition(".")[2]: value for name, value in metrics.items() if "." in name}
    selected |= {name: value for name, value in metrics.items() if "." not in name}
    return {name: value for name, value in selected.items() if name != "loss"}
