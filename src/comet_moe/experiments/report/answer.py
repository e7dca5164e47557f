"""The box at the top of a study: what to use, whether a mixture pays and routes, and what it costs."""

from dataclasses import dataclass
from typing import Any

from comet_moe.experiments.report.format import format_error, format_scaled, round_number
from comet_moe.experiments.studies.frontier import Row, best_by_validation, frontier, is_mixture
from comet_moe.experiments.studies.significance import is_significant
from comet_moe.experiments.studies.winner import Winner
from comet_moe.experiments.training.records import TREES

MEANINGS = {
    "routes": "other samples run other experts",
    "blends": "the same experts run for all samples, with weights that depend on the sample",
    "static": "it does not route, every sample gets the same experts with the same weights",
    "dense": "it does not choose, every sample uses all of its experts",
}


MATTERS = {True: "Yes. ", False: "No significant effect. ", None: ""}
"""By whether exchanged routes raise the loss significantly; one seed cannot tell."""


@dataclass(frozen=True)
class Answer:
    """What answer.html shows.

    Attributes:
        pays: "yes", "no" or "unknown", which is the colour of the box.
        sentence: what to use, and why.
        facts: further questions, each with its answer.
    """

    pays: str
    sentence: str
    facts: list[tuple[str, str]]


def build_answer(rows: list[Row], decision: Winner) -> Answer:
    """The box, from the rows of `compare_gates` and their `winner`."""
    pays = "unknown" if decision.pays is None else "yes" if decision.pays else "no"
    mixtures = [row for row in rows if is_mixture(row)]
    shown = next((row for row in mixtures if row["gate"] == decision.winner), best_by_validation(mixtures))
    texts = [decision.answer, _does_it_route(shown), _does_routing_matter(shown), _costs(rows, decision)]
    facts = [text.partition("? ") for text in texts if text]
    return Answer(pays, decision.recommendation, [(f"{question}?", text) for question, _, text in facts])


def _does_it_route(shown: Row | None) -> str:
    """Of the recommended mixture, or of the best one where none is recommended."""
    if shown is None or shown["verdict"] is None:
        return ""
    words = [f"{owner} {numbers['verdict']}" for owner, numbers in shown["routing"].items()]
    meaning = MEANINGS.get(shown["verdict"], f"its gates differ ({', '.join(words)})")
    return f"Does it route? {shown['gate']}: {shown['verdict']}, {meaning}."


def _does_routing_matter(shown: Row | None) -> str:
    if shown is None or shown["routing_gain_mean"] is None:
        return ""
    gain, loss, error = shown["routing_gain_mean"], shown["test_loss_mean"], shown["routing_gain_se"]
    shift = f"{gain:+.2f}" + ("" if error is None else f" {format_error(error, 2)}")
    return (
        f"Does routing matter? {MATTERS[is_significant(shown['p_routing_gain'])]}The loss of "
        f"{shown['gate']}, {loss:.2f}, changes by {shift} when samples exchange their routes at random."
    )


def _costs(rows: list[Row], decision: Winner) -> str:
    named = [row for row in rows if row["gate"] in (decision.winner, decision.rival)]
    costs = [
        f"{row['gate']} {format_scaled(row['flops_per_sample_mean'])}"
        for row in named
        if row["flops_per_sample_mean"] is not None
    ]
    times = [f"{row['gate']} {1e6 * time:.3g}" for row in named if (time := _seconds_per_row(row))]
    parts = [f"Operations per sample: {', '.join(costs)}."] if costs else []
    parts += [f"Microseconds to predict a row: {', '.join(times)}."] if times else []
    return f"What does it cost? {' '.join(parts)}" if parts else ""


def _seconds_per_row(row: Row) -> float | None:
    """The measured time of a prediction, where the study has it."""
    found: float | None = row.get("predict_seconds_per_row")
    return found


def frontier_data(rows: list[Row]) -> dict[str, Any]:
    """What the plot of losses by operations draws; empty without two networks whose operations are known."""
    known = [row for row in rows if row["test_loss_mean"] is not None]
    points = [row for row in known if row["flops_per_sample_mean"]]
    if len(points) < 2:
        return {}
    return {
        "points": {
            row["gate"]: {
                "operations": round_number(row["flops_per_sample_mean"]),
                "loss": round_number(row["test_loss_mean"]),
                "error": round_number(row["test_loss_se"]),
                "time": round_number(_seconds_per_row(row)),
            }
            for row in points
        },
        "line": [row["gate"] for row in frontier(rows)],
        "hasTimes": all(_seconds_per_row(row) for row in points),
        "trees": next((round_number(row["test_loss_mean"]) for row in known if row["gate"] == TREES), None),
    }
