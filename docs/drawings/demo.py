"""Print what README shows of the demo, and draw its frontier: python docs/drawings/demo.py

``demo.json`` beside this file is what `comet-moe demo --json` printed.
"""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from comet_moe.experiments.report.answer import build_answer
from comet_moe.experiments.report.frontier_picture import THEMES, draw_frontier
from comet_moe.experiments.studies.comparison_table import comparison_table
from comet_moe.experiments.studies.render import to_rich
from comet_moe.experiments.studies.winner import winner

FOLDER = Path(__file__).parent
WIDTH = 100
"""Of the text, as wide as README's code blocks."""


def read_table() -> dict[str, Any]:
    """The first table of the demo."""
    table: dict[str, Any] = json.loads((FOLDER / "demo.json").read_text(encoding="utf-8"))["tables"][0]
    return table


def show(table: dict[str, Any]) -> str:
    """What a terminal shows of it."""
    answer = build_answer(table["rows"], winner(table["rows"]))
    console = Console(width=WIDTH, color_system=None, force_terminal=True, highlight=False)
    with console.capture() as printed:
        title = f"{table['name']}: {table['words']}"
        console.print(to_rich(comparison_table(title, table["rows"], {}), WIDTH))
        for words in (*(" ".join(fact) for fact in answer.facts), answer.sentence):
            console.print(words)
        console.print("\n".join(["", *(f"  {line}" for line in table["plane"])]))
    lines = (line.rstrip() for line in printed.get().strip().splitlines())
    return "\n".join(lines)


def draw(table: dict[str, Any]) -> dict[str, str]:
    """The files of its frontier by name."""
    title = "Four regions: test loss by operations of dense networks (squares) and mixtures (circles)"
    return {f"frontier-{theme}.svg": draw_frontier(table["rows"], title, theme) for theme in THEMES}


if __name__ == "__main__":
    for name, text in draw(read_table()).items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(show(read_table()))
