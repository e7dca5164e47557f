r"""Does it pay? The loss of a network against what dense networks reach at its own cost.

Dense networks of several widths are points (c_j, l_j): measured operations per sample, and the mean test loss
over seeds. Between two neighbours the frontier is linear in log c. With
:math:`w = \log(c / c_j) / \log(c_{j+1} / c_j)` and standard errors e,

.. math:: f(c) = (1 - w) \, l_j + w \, l_{j+1}, \qquad
    e(c)^2 = (1 - w)^2 e_j^2 + w^2 e_{j+1}^2

A network that is cheaper than every dense one is compared with the cheapest of them. A network that is more
costly than every dense one cannot be compared.

A cheaper dense network may have a lower loss than the frontier at c, since wide ones overfit. So the loss has
to be below the frontier at c and below every dense network that costs less. The p-value is the largest of
these one-sided tests of Welch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt

from scipy.stats import t as student

from comet_moe.experiments.studies.significance import Summary

SAME_COST = 0.05
"""Two networks whose operations differ by at most this share have the same cost."""


@dataclass(frozen=True)
class Point:
    """A network: its name, measured operations per sample, and losses over seeds."""

    name: str
    operations: float
    loss: Summary


@dataclass(frozen=True)
class Estimate:
    """A weighted sum of means, Σ w_i m_i, with the terms that a test needs."""

    terms: tuple[tuple[float, Summary], ...]

    @property
    def mean(self) -> float:
        """Σ w_i m_i."""
        return sum(weight * summary.mean for weight, summary in self.terms)

    @property
    def se(self) -> float | None:
        """sqrt(Σ w_i² e_i²); None if a term has one number only."""
        if any(summary.se is None for _, summary in self.terms):
            return None
        return sqrt(sum((weight * (summary.se or 0.0)) ** 2 for weight, summary in self.terms))


@dataclass(frozen=True)
class Frontier:
    """The dense networks of a study, by their cost; at least one."""

    points: tuple[Point, ...]

    @classmethod
    def of(cls, points: Sequence[Point]) -> "Frontier | None":
        """The frontier of ``points`` in any order; None if there are none."""
        return cls(tuple(sorted(points, key=lambda point: point.operations))) if points else None

    def at(self, operations: float) -> Estimate | None:
        """The loss of a dense network with so many operations; None beyond the most costly one."""
        for below, above in zip(self.points, self.points[1:], strict=False):
            if below.operations <= operations <= above.operations and below.operations < above.operations:
                share = log(operations / below.operations) / log(above.operations / below.operations)
                return Estimate(((1 - share, below.loss), (share, above.loss)))
        first, last = self.points[0], self.points[-1]
        if operations <= first.operations:
            return Estimate(((1.0, first.loss),))
        return Estimate(((1.0, last.loss),)) if is_same_cost(operations, last.operations) else None

    def p_value(self, point: Point) -> float | None:
        """One-sided p-value that ``point`` is below the frontier at its own operations.

        None where it cannot be tested: too few seeds, or more costly than every dense network.
        """
        frontier = self.at(point.operations)
        if frontier is None:
            return None
        cheaper = [
            Estimate(((1.0, dense.loss),)) for dense in self.points if dense.operations < point.operations
        ]
        values = [p_below(point.loss, rival) for rival in (frontier, *cheaper)]
        return None if None in values else max(value for value in values if value is not None)


def is_same_cost(one: float, other: float) -> bool:
    """Whether the operations of two networks differ by at most 5 % of the larger."""
    return abs(one - other) <= SAME_COST * max(one, other)


def p_below(loss: Summary, rival: Estimate) -> float | None:
    """Welch's one-sided p-value that the mean of ``loss`` is below ``rival``.

    t = (m - r) / sqrt(Σ v_i), with v_i the squared standard error of each term, and
    (Σ v_i)² / Σ (v_i² / (n_i - 1)) degrees of freedom. None if a term has fewer than two numbers, or if
    nothing varies.
    """
    terms = ((1.0, loss), *((weight, summary) for weight, summary in rival.terms if weight))
    if any(summary.se is None for _, summary in terms):
        return None
    variances = [((weight * (summary.se or 0.0)) ** 2, summary.count) for weight, summary in terms]
    total = sum(variance for variance, _ in variances)
    if total == 0:
        return None
    freedom = total**2 / sum(variance**2 / (count - 1) for variance, count in variances)
    return float(student.cdf((loss.mean - rival.mean) / sqrt(total), freedom))


def holm(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Holm's correction: the i-th smallest of m p-values times m - i + 1, never below the one before."""
    tested = sorted((p, name) for name, p in values.items() if p is not None)
    corrected: dict[str, float | None] = dict.fromkeys(values)
    largest = 0.0
    for place, (p, name) in enumerate(tested):
        largest = max(largest, min(1.0, p * (len(tested) - place)))
        corrected[name] = largest
    return corrected
