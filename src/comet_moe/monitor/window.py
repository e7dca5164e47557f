"""The statistics of one gate over its last batches, and the warning about them."""

from collections import deque
from collections.abc import Iterable
from html import escape
from typing import Any, get_args

from comet_moe.exceptions import RoutingWarning, StaticRoutingWarning
from comet_moe.notebook import bars, table, verdict_badge
from comet_moe.routing import Routing
from comet_moe.statistics import RoutingStatistics
from comet_moe.verdict import NUMBERS, Problem, describe_numbers, explain

RECENT_BATCHES = 5
"""Batches that a warning rests on: 100 steps with the default interval of 20."""


class GateWindow:
    """The statistics of one gate.

    Args:
        window: batches to keep.
    """

    def __init__(self, window: int):
        self.passes = 0
        self.has_new = False
        self.has_warned = False
        self._window: deque[RoutingStatistics] = deque(maxlen=window)
        self._added = 0
        self._evaluation: RoutingStatistics | None = None
        self._is_evaluating = False

    def wants(self, training: bool, interval: int) -> bool:
        """Count a pass, and return whether to add it."""
        if not training:
            return True
        self._is_evaluating = False
        self.passes += 1
        return (self.passes - 1) % interval == 0

    def add(self, routing: Routing, training: bool) -> None:
        """Add one batch, to the window or to the evaluation."""
        self.has_new = True
        if training:
            batch = RoutingStatistics()
            self._window.append(batch)
            self._added += 1
        elif self._evaluation is None or not self._is_evaluating:
            batch = self._evaluation = RoutingStatistics()
            self._is_evaluating = True
        else:
            batch = self._evaluation
        batch.add(routing)

    def is_due(self) -> bool:
        """Whether the last batch completes ``RECENT_BATCHES`` new ones, or a whole window if that is less."""
        assert self._window.maxlen is not None
        return self._added % min(RECENT_BATCHES, self._window.maxlen) == 0

    def problem(self) -> dict[str, Any] | None:
        """The statistics of the last batches if they show a gate that does not route; else None.

        None, too, for a gate that was still dense in the first of these batches.
        """
        recent = list(self._window)[-RECENT_BATCHES:]
        if not recent or recent[0].result()["verdict"] == "dense":
            return None
        statistics = _merged(recent)
        return statistics if statistics["verdict"] in get_args(Problem) else None

    def result(self, evaluation: bool) -> dict[str, Any] | None:
        """The statistics of the window or of the last evaluation; None without a batch."""
        if evaluation:
            return None if self._evaluation is None else _merged([self._evaluation])
        return _merged(self._window) if self._window else None


def _merged(batches: Iterable[RoutingStatistics]) -> dict[str, Any]:
    total = RoutingStatistics()
    for batch in batches:
        total.merge(batch)
    statistics = total.result()
    del statistics["execution"]
    return statistics


def make_warning(name: str, statistics: dict[str, Any]) -> RoutingWarning:
    """The warning about gate ``name``, from what :meth:`GateWindow.problem` returned."""
    numbers = describe_numbers(**{name: statistics[name] for name in NUMBERS})
    kind = StaticRoutingWarning if statistics["verdict"] == "static" else RoutingWarning
    return kind(explain(statistics["verdict"], [name], f"{numbers}, in {statistics['samples']} samples"))


COLUMNS = {
    "verdict": "verdict",
    "information": "information",
    "selection_information": "selection",
    "experts_per_sample": "experts per sample",
    "shared_experts": "in common",
    "load_ratio": "load ratio",
    "dead_experts": "dead",
}


def _summary_rows(statistics: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Heads, and the cells of each gate."""
    rows = [["gate", *COLUMNS.values()]]
    for name, found in statistics.items():
        values = {**found, "dead_experts": len(found["dead_experts"])}
        cells = (values[column] for column in COLUMNS)
        rows.append([name, *(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)])
    return rows


def summary_html(statistics: dict[str, dict[str, Any]]) -> str:
    """One row per gate with a bar for the load of each expert, for notebooks."""
    heads, *rows = _summary_rows(statistics)
    cells = [
        [escape(name), verdict_badge(verdict), *map(escape, numbers), bars(found["share_of_samples"])]
        for (name, verdict, *numbers), found in zip(rows, statistics.values(), strict=True)
    ]
    return table("Do the gates route?", [*heads, "load"], cells)


def summary_table(statistics: dict[str, dict[str, Any]]) -> str:
    """One line per gate under a line of names, as text."""
    rows = _summary_rows(statistics)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
