"""The subsection "Does it route?": the verdict on each gate, the numbers behind it, and plots."""

from dataclasses import dataclass
from typing import Any

from comet_moe.experiments.report.format import MISSING
from comet_moe.experiments.report.plots import ROUTING_PLOTS, PlotView, build_plot
from comet_moe.experiments.studies.defaults import MAX_TASKS
from comet_moe.experiments.studies.frontier import Row
from comet_moe.gates.registry import is_dense

MEASURES = ("routing_gain", "information", "effective_experts", "load_ratio", "dead_experts")
DECIMALS = (2, 3, 2, 2, 1)


@dataclass(frozen=True)
class Part:
    """A plot of the subsection under its own heading."""

    title: str
    content: PlotView


@dataclass(frozen=True)
class Verdicts:
    """What routes.html shows: each row has a gate, a task or layer, a verdict and numbers as text."""

    headline: str
    rows: list[tuple[str, str, str, list[str]]]
    parts: list[Part]


def build_verdicts(rows: list[Row], data: dict[str, Any]) -> Verdicts | None:
    """The subsection from ``rows`` of the comparison and ``data`` of the section; None without either."""
    views = ((plot.title, build_plot(plot, data)) for plot in ROUTING_PLOTS)
    parts = [Part(title, view) for title, view in views if view is not None]
    lines = [line for row in rows for line in _lines(row)]
    if not any(row["routing"] for row in rows) and not parts:
        return None
    return Verdicts(_headline(rows), lines, parts)


def _headline(rows: list[Row]) -> str:
    """Which gates route, and which do not."""
    gates: dict[str, list[str]] = {}
    for row in rows:
        if row["verdict"] is not None and not is_dense(row["gate"]):
            gates.setdefault(row["verdict"], []).append(row["gate"])
    words = sorted(gates, key=lambda word: (word != "routes", word))
    return f"In a word: {'; '.join(f'{_join(gates[word])}: {word}' for word in words)}." if gates else ""


def _join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _lines(row: Row) -> list[tuple[str, str, str, list[str]]]:
    """One line per task; one line for the gate if it has many tasks or layers; none for a dense network."""
    if row["verdict"] is None or is_dense(row["gate"]):
        return []
    if len(row["routing"]) > MAX_TASKS:
        return [(row["gate"], f"mean of {len(row['routing'])}", row["verdict"], _numbers(row))]
    return [
        (row["gate"], owner, described["verdict"], _numbers(described))
        for owner, described in row["routing"].items()
    ]


def _numbers(described: dict[str, Any]) -> list[str]:
    values = [described[f"{name}_mean"] for name in MEASURES]
    return [
        MISSING if value is None else f"{value:.{places}f}"
        for value, places in zip(values, DECIMALS, strict=True)
    ]
