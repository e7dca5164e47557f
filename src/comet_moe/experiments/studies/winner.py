"""What the comparison of gates says: whether a mixture pays, and which gate to use.

Rows are those of `comet_moe.experiments.studies.tables.compare_gates`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from comet_moe.experiments.studies.render import format_p_equation
from comet_moe.experiments.studies.significance import (
    SIGNIFICANCE_LEVEL,
    Summary,
    is_significant,
    welch_t_test,
)
from comet_moe.experiments.training.records import TREES
from comet_moe.gates.registry import DENSE_KINDS

DENSE = "dense"
"""No mixture, one expert as costly as the selected ones: what every gate is compared with."""
PER_TASK = "dense-per-task"
"""No mixture, one expert for each task, together as costly: what a gate may become that does not route."""

SAME_COST = 1.1
"""A network with at most so many times the operations of another is as costly.

Targets with gates of their own select more experts together than each of them. So a mixture may take more
operations than `dense`, which has the cost of the experts of one target.
"""

Row = dict[str, Any]


def p_against_dense(row: dict[str, Any]) -> tuple[float, str] | None:
    """The larger p-value of a row against ``dense`` and ``dense-per-task``, and which it is; None without."""
    tests = [(row["p_dense"], DENSE), (row["p_per_task"], PER_TASK)]
    return max(((p, name) for p, name in tests if p is not None), default=None)


def does_a_mixture_pay(rows: list[dict[str, Any]], format_p: Callable[[float], str]) -> str | None:
    """Whether a gate has a lower test loss than the dense networks of the same cost; None without ``dense``.

    Args:
        rows: of one study, from `compare_gates`.
        format_p: makes text of a p-value, such as "p = 0.012".
    """
    mixtures = [row for row in rows if row["gate"] not in DENSE_KINDS and row["test_loss_mean"] is not None]
    dense = next((row for row in rows if row["gate"] == DENSE), None)
    if dense is None or dense["test_loss_mean"] is None or not mixtures:
        return None
    tested = [(test[0], row) for row in mixtures if (test := p_against_dense(row)) is not None]
    question = "Does a mixture pay on this data?"
    if not tested:
        return f"{question} That takes two trials of {DENSE} and of another gate to test."
    untested = [row["gate"] for row in mixtures if p_against_dense(row) is None]
    rest = f" Not tested, with one trial or no spread: {', '.join(untested)}." if untested else ""
    has_both = any(row["p_per_task"] is not None for row in mixtures)
    both, either = (f"{DENSE} {word} {PER_TASK}" if has_both else DENSE for word in ("and of", "or of"))
    p, best = min(tested, key=lambda test: (test[0], test[1]["test_loss_mean"]))
    found = f"{format_p(p)}, {_among(len(tested))}"
    if is_significant(p):
        answer = f"{question} Yes: the test loss of {best['gate']} is below that of {both} ({found})."
        return f"{answer}{_unless_it_routes(best['verdict'])}{rest}"
    if p > 1 - SIGNIFICANCE_LEVEL:
        closest = min((row for _, row in tested), key=lambda row: row["test_loss_mean"])
        every = "every tested gate" if untested else "every gate"
        reverse = format_p(1 - p)  # the largest of the p-values that dense is below a gate
        return (
            f"{question} No: the test loss of {either} is below that of {every} ({reverse} or less), the "
            f"closest of which is {closest['gate']}.{rest}"
        )
    return (
        f"{question} That is not shown: no test loss is significantly below that of {both}; the closest is "
        f"that of {best['gate']} ({found}).{rest}"
    )


def _unless_it_routes(verdict: str | None) -> str:
    """What to say of a gate that has the lower loss, and the same experts for nearly all samples."""
    if verdict is None or not set(verdict.split(" / ")) <= {"static", "blends"}:
        return ""
    return f" But it does not route ({verdict}): something else than its choice of experts pays."


def _among(tests: int) -> str:
    return "the only test" if tests == 1 else f"the lowest of {tests} p-values"


@dataclass(frozen=True)
class Recommendation:
    """What to use on a table.

    Attributes:
        gate: the name of the row to use, boosted trees among them; None if no run is complete.
        sentence: what to use, and why.
    """

    gate: str | None
    sentence: str


def recommend(rows: Sequence[Row]) -> Recommendation:
    """What to use on this table: `compare` prints it, and `predict` uses it."""
    complete = {row["gate"]: row for row in rows if row["test_loss_mean"] is not None}
    if not complete:
        return Recommendation(None, "No run is complete: see the reasons in the study folder.")
    best = min(complete.values(), key=lambda row: row["test_loss_mean"])
    name = best["gate"]
    if name == TREES:
        rivals = [row for row in complete.values() if row["gate"] != TREES]
        shown = all(is_significant(p_below(best, loss_of(row))) for row in rivals)
        return Recommendation(
            name,
            f"Use boosted trees: their test loss is the lowest"
            f"{'' if shown else ', though not significantly below that of every network'}.",
        )
    against = None if name == DENSE else p_against_dense(best)
    if against is None:
        return Recommendation(name, f"Use {name}: its test loss is the lowest of {len(complete)}.")
    (p, plain), found = against, format_p_equation(against[0])
    if not is_significant(p):
        return Recommendation(
            plain,
            f"Use {plain}, {_AS_COSTLY_AS_SELECTED[plain]} as costly as the selected experts: {name} has the "
            f"lowest test loss, but not significantly lower ({found}).",
        )
    times = best["flops_per_sample_mean"] / complete[plain]["flops_per_sample_mean"]
    if times <= SAME_COST:
        return Recommendation(
            name,
            f"Use {name}: its test loss is below that of a dense network of the same cost ({plain}, "
            f"{found}), and it {_routes(best)}.",
        )
    if name in DENSE_KINDS:
        return Recommendation(
            name,
            f"Use {name}: its test loss is below that of {plain} ({found}). It takes {times:.1f} times as "
            f"many operations.",
        )
    return Recommendation(
        name,
        f"Use {name} or a wider dense network: the test loss of {name} is below that of {plain} "
        f"({found}), and it {_routes(best)}, but it takes {times:.1f} times as many operations. Compare it "
        f"with a dense network as costly: --gates {plain} with a larger --set gate.k.",
    )


_AS_COSTLY_AS_SELECTED = {"dense": "one network", "dense-per-task": "one network for each task, together"}
"""The networks without a mixture that a gate is to be better than."""


def _routes(row: Row) -> str:
    if row["gate"] in DENSE_KINDS:
        return "has no gate"
    return {"routes": "routes", "dense": "uses all experts"}.get(row["verdict"], f"is {row['verdict']}")


def loss_of(row: Row) -> Summary | None:
    """The test loss of a row; None if it has no complete trial."""
    if row["test_loss_mean"] is None:
        return None
    return Summary(row["test_loss_mean"], row["test_loss_se"], row["trials_used"])


def p_below(row: Row, reference: Summary | None) -> float | None:
    """One-sided p-value that the test loss of ``row`` is below ``reference``; None without a test."""
    loss = loss_of(row)
    return None if loss is None or reference is None else welch_t_test(loss, reference)
