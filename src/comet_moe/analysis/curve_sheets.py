"""Curves and tuning-reduction factors as sheets."""

from typing import Any

from comet_moe.analysis.sheets import EMPTY, Cell, Column, Sheet, decimals
from comet_moe.analysis.study import Study

Row = dict[str, Any]


CURVE_NOTE = (
    "Test loss x100 of the best of so many trials by validation loss: its expectation, and where the middle "
    "90 % of the draws lie."
)
REDUCTION_NOTE = (
    "loss: what the rival comes to with its budget, half of its trials or all; trials: the fewest with which "
    "either gets there; factor: the rival's over the gate's; 95 %, never: over resamples of the trials."
)


def curve_sheet(study: Study, rows: list[Row]) -> Sheet:
    """A column a gate, a line a budget (``curve_rows``)."""
    gates = list(dict.fromkeys(row["gate"] for row in rows))
    found = {(row["gate"], row["budget"]): row for row in rows}
    places = decimals(row["mean_se"] for row in rows if row["budget"] == 1)
    lines = [
        [Cell(str(budget)), *(_loss(found.get((gate, budget)), places) for gate in gates)]
        for budget in sorted({row["budget"] for row in rows})
    ]
    return Sheet(study.title, [Column("trials"), *map(Column, gates)], lines)


def reduction_sheet(study: Study, rows: list[Row]) -> Sheet:
    """Two lines a pair of gates, at half and at all of the rival's budget (``reduction_rows``)."""
    budgets: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        budgets.setdefault((row["gate"], row["rival"]), []).append(row)
    names = ("gate", "rival", "budget", "loss", "rival's trials", "gate's trials", "factor", "95 %", "never")
    lines = [_reduction(row) for of_pair in budgets.values() for row in _half_and_all(of_pair)]
    return Sheet(f"{study.title}: tuning reduction", [Column(name) for name in names], lines)


def _half_and_all(rows: list[Row]) -> list[Row]:
    largest = max(row["budget"] for row in rows)
    half = max((row["budget"] for row in rows if 2 * row["budget"] <= largest), default=largest)
    return [row for row in rows if row["budget"] in (half, largest)]


def _loss(row: Row | None, places: int) -> Cell:
    if row is None:
        return EMPTY
    return Cell(f"{row['expected']:.{places}f} ({row['low']:.{places}f}-{row['high']:.{places}f})")


def _reduction(row: Row) -> list[Cell]:
    texts = [
        row["gate"],
        row["rival"],
        str(row["budget"]),
        f"{row['loss']:.2f}",
        str(row["rival_trials"]),
        "never" if row["gate_trials"] is None else str(row["gate_trials"]),
        _factor(row["factor"]),
        f"{_factor(row['factor_low'])} to {_factor(row['factor_high'])}",
        f"{100 * row['never']:.0f} %",
    ]
    return [Cell(text) for text in texts]


def _factor(factor: float | None) -> str:
    return "never" if factor is None else f"{factor:.3g}"
