"""Unpaired one-sided t-tests, from samples or from what a paper prints of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
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
