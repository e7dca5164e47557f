"""Does a mixture pay? Its test loss against that of dense networks at its own cost.

Dense networks of several widths make the frontier: test loss by measured operations per sample, linear in the
logarithm of the operations between two widths. A mixture pays if its loss beats

- the frontier at its own operations,
- and every dense network that costs no more, `dense-per-task` among them.

The p-value is the largest of these tests: one network that is as good and as cheap is enough to say no. A
mixture that costs more than the widest dense network cannot be compared.

Rows are those of `comet_moe.experiments.studies.tables.compare_gates`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log
from typing import Any

from comet_moe.experiments.studies.significance import (
    Summary,
    correct_p_values,
    interpolate,
    is_significant,
    welch_t_test,
)
from comet_moe.experiments.training.records import BASELINES
from comet_moe.gates.registry import is_dense

PER_TASK = "dense-per-task"
"""No mixture, one expert for each task: not on the frontier, and one more network to compare with."""

SAME_COST = 1.05
"""Two networks are of the same cost if their operations differ by at most this factor."""

AT_ITS_COST = "dense networks with as many operations"

DENSE_TEST = (
    "Welch's one-sided t-tests against each dense network that costs no more, and against what dense "
    "networks reach at the gate's own operations; the largest p-value, corrected by Holm's method but for "
    "the mixture with the lowest validation loss, and the best one of their cost where that costs more"
)

Row = dict[str, Any]
"""A row of `comet_moe.experiments.studies.tables.compare_gates`."""


@dataclass(frozen=True)
class DenseTest:
    """A network against the dense ones of at most its cost.

    Attributes:
        p: that its test loss does not beat all of theirs; None where a loss has no standard error.
        rival: the one that is hardest to beat, a name or ``AT_ITS_COST``.
        loss: the test loss of the rival.
        reaches: the operations of the network divided by those of the widest dense one.
    """

    p: float | None
    rival: str
    loss: float
    reaches: float


def loss_of(row: Row) -> Summary | None:
    """The test loss of a row; None if it has no complete trial.

    The fit of a baseline has no seed, so that its loss has no error over seeds.
    """
    if row["test_loss_mean"] is None:
        return None
    if row["gate"] in BASELINES:
        return Summary(row["test_loss_mean"], 0.0, 1, freedom=inf)
    return Summary(row["test_loss_mean"], row["test_loss_se"], row["trials_used"])


def p_below(row: Row, reference: Row | None) -> float | None:
    """One-sided p-value of a test whether ``row`` beats the loss of ``reference``; None without a test."""
    loss, other = loss_of(row), None if reference is None else loss_of(reference)
    if loss is None or other is None or reference is None:
        return None
    return welch_t_test(loss, other, rows_error(row, reference["gate"]))


def rows_error(row: Row, other: str) -> float | None:
    """Standard error over test rows of the difference of the test losses; None where it is not known."""
    found: float | None = (row.get("rows_error") or {}).get(other)
    return found


def is_mixture(row: Row) -> bool:
    """Whether it is the row of a gate that has a result."""
    return row["test_loss_mean"] is not None and row["gate"] not in BASELINES and not is_dense(row["gate"])


def best_by_validation(rows: Sequence[Row]) -> Row | None:
    """The row with the lowest mean validation loss; None without any."""
    known = [row for row in rows if row["validation_loss_mean"] is not None]
    return min(known, key=lambda row: row["validation_loss_mean"], default=None)


def frontier(rows: Sequence[Row]) -> list[Row]:
    """The dense networks by their operations, without `dense-per-task`."""
    points = [row for row in rows if is_dense(row["gate"]) and row["gate"] != PER_TASK and _is_known(row)]
    return sorted(points, key=lambda row: row["flops_per_sample_mean"])


def loss_at(points: Sequence[Row], operations: float) -> tuple[Summary, list[tuple[str, float]]] | None:
    """The loss of the frontier at a number of operations, and the shares of two networks in it.

    None outside of the frontier.
    """
    for first, second in pairwise(points):
        low, high = first["flops_per_sample_mean"], second["flops_per_sample_mean"]
        if low <= operations <= high and low < high:
            left, right = loss_of(first), loss_of(second)
            assert left is not None
            assert right is not None
            share = log(operations / low) / log(high / low)
            shares = [(first["gate"], 1 - share), (second["gate"], share)]
            return interpolate(left, right, share), shares
    return None


def test_against_dense(row: Row, rows: Sequence[Row]) -> DenseTest | None:
    """``row``, a mixture or `dense-per-task`, against the dense ``rows``; None if either is missing."""
    points = frontier(rows)
    if not points or not _is_known(row) or row in points:
        return None
    loss, operations = loss_of(row), row["flops_per_sample_mean"]
    assert loss is not None
    others = [*points, *(other for other in rows if other["gate"] == PER_TASK and _is_known(other))]
    others = [other for other in others if other["gate"] != row["gate"]]
    cheaper = [other for other in others if _costs_no_more(other, operations)]
    # One that is cheaper than all of them has to beat the cheapest.
    rivals = [(other["gate"], loss_of(other), [(other["gate"], 1.0)]) for other in cheaper or points[:1]]
    if (at := loss_at(points, operations)) is not None:
        rivals.append((AT_ITS_COST, *at))
    tests = [
        (welch_t_test(loss, other, _rows_error_of(row, shares)), name, other.mean)
        for name, other, shares in rivals
        if other is not None
    ]
    p, name, mean = max(tests, key=lambda test: (test[0] is None, test[0] or 0.0, -test[2]))
    return DenseTest(p, name, mean, operations / points[-1]["flops_per_sample_mean"])


def add_dense_tests(rows: Sequence[Row]) -> list[Row]:
    """``rows`` with the results of `test_against_dense`, None where there is none.

    ``p_dense`` is the p-value, uncorrected for the best mixture and the `judged_mixture`. Those of all other
    rows are corrected by Holm's method. ``dense_rival``, ``dense_loss`` and ``dense_reaches`` are the other
    fields of the test.
    ``significant_dense``: p is below 0.05, and the dense networks reach the cost.
    """
    tests = {row["gate"]: test_against_dense(row, rows) for row in rows if row["gate"] not in BASELINES}
    found = []
    for row in rows:
        test = tests.get(row["gate"])
        names = ("rival", "loss", "reaches")
        fields = {f"dense_{name}": None if test is None else getattr(test, name) for name in names}
        found.append(row | fields | {"p_dense": None if test is None else test.p})
    ranked = [row for row in found if row["converged"] and is_mixture(row)]
    ranked = ranked or [row for row in found if is_mixture(row)]
    in_turn = [row["gate"] for row in (best_by_validation(ranked), judged_mixture(ranked)) if row]
    p_values = {gate: test.p for gate, test in tests.items() if test is not None and test.p is not None}
    others = {gate: p for gate, p in p_values.items() if gate not in in_turn}
    p_values |= correct_p_values(others)
    for row in found:
        p = p_values.get(row["gate"])
        row |= {"p_dense": p, "significant_dense": is_significant(p) and _is_reached(row)}
    return found


def judged_mixture(rows: Sequence[Row]) -> Row | None:
    """The mixture that says whether mixtures pay, the one with the lowest validation loss.

    If it beats all dense networks, but costs more than any of them, that does not tell. Then the best one of
    their cost is judged. Its p-value needs no correction, because it is tested only after the first one.
    """
    mixtures = [row for row in rows if is_mixture(row)]
    best = best_by_validation(mixtures)
    if best is None or _is_reached(best) or not is_significant(best["p_dense"]):
        return best
    return best_by_validation([row for row in mixtures if _is_reached(row)]) or best


def _is_reached(row: Row) -> bool:
    """Whether the widest dense network has at least the operations of ``row``, within 5 %."""
    return row["dense_reaches"] is not None and bool(row["dense_reaches"] <= SAME_COST)


def _rows_error_of(row: Row, shares: Sequence[tuple[str, float]]) -> float | None:
    """As `rows_error`, of the difference from a mean of networks: at most the mean of their errors."""
    errors = [(rows_error(row, gate), share) for gate, share in shares]
    known = [share * error for error, share in errors if error is not None]
    return sum(known) if len(known) == len(shares) else None


def _is_known(row: Row) -> bool:
    return row["test_loss_mean"] is not None and row["flops_per_sample_mean"] is not None


def _costs_no_more(row: Row, operations: float) -> bool:
    return bool(row["flops_per_sample_mean"] <= SAME_COST * operations)
