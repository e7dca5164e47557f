"""Tables as text: Markdown, TeX, CSV, and for the terminal."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from comet_moe.analysis.sheets import Cell, Sheet

_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    **{sign: "\\" + sign for sign in "&%$#_{}"},
}


def markdown(sheet: Sheet) -> str:
    """The title in bold, and a pipe table."""
    lines = [f"**{markdown_text(sheet.title)}**", ""]
    lines += [
        _piped(markdown_text(column.name) for column in sheet.columns),
        _piped("---" for _ in sheet.columns),
    ]
    return "\n".join([*lines, *(_piped(map(_markdown_cell, row)) for row in sheet.rows)]) + "\n"


def tex(sheets: Sequence[Sheet], notes: Sequence[str]) -> str:
    r"""One ``tabular`` that needs no package, a block a sheet as in the paper; ``notes`` as comments above.

    The sheets have the same columns, and their titles stand in the first.
    """
    shown = [at for at, column in enumerate(sheets[0].columns) if column.tex is not None]
    heading = " & ".join(["Dataset", *(sheets[0].columns[at].tex or "" for at in shown)])
    lines = [rf"\begin{{tabular}}{{|l|{'l|' * len(shown)}}}", r"\hline", rf"{heading} \\ \hline"]
    for sheet in sheets:
        titles = [tex_text(sheet.title), *[""] * (len(sheet.rows) - 1)]
        ends = [*[r"\\"] * (len(sheet.rows) - 1), r"\\ \hline"]
        for title, row, end in zip(titles, sheet.rows, ends, strict=True):
            lines.append(f"{' & '.join([title, *(_tex_cell(row[at]) for at in shown)])} {end}")
    return "\n".join([*(f"% {note}" for note in notes), *lines, r"\end{tabular}"]) + "\n"


def comma_separated(rows: list[dict[str, Any]]) -> str:
    """CSV in full precision: a column for every key of any row, in their order; nothing for None."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row with ``metrics`` spread over columns ``NAME_mean`` and ``NAME_se``, as CSV needs it."""
    spread = {
        f"{name}_{part}": value for name, parts in row["metrics"].items() for part, value in parts.items()
    }
    return {name: value for name, value in row.items() if name != "metrics"} | spread


def terminal(sheet: Sheet) -> Table:
    """A table for rich to print."""
    table = Table(title=Text(sheet.title), title_justify="left", box=SIMPLE_HEAD)
    for column in sheet.columns:
        table.add_column(Text(column.name), justify="right")
    for row in sheet.rows:
        table.add_row(*map(_terminal_cell, row))
    return table


def _piped(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_cell(cell: Cell) -> str:
    text = markdown_text(cell.text)
    return ("\\* " if cell.starred else "") + (f"**{text}**" if cell.bold else text) + _error(cell)


def markdown_text(text: str) -> str:
    """``text`` with every sign that Markdown would take for its own escaped."""
    return re.sub(r"([\\|*_`<>])", r"\\\1", text)


def _terminal_cell(cell: Cell) -> Text:
    return Text(("* " if cell.starred else "") + cell.text + _error(cell), style="bold" if cell.bold else "")


def _error(cell: Cell) -> str:
    return "" if cell.error is None else f" ± {cell.error}"


def _tex_cell(cell: Cell) -> str:
    if cell.error is None and not (cell.bold or cell.starred):
        return tex_text(cell.in_paper or cell.text)
    star = "{}^*" if cell.starred else ""
    mean = rf"\mathbf{{{cell.text}}}" if cell.bold else cell.text
    error = "" if cell.error is None else rf"\pm{cell.error}"
    return f"${star}{mean}{error}$"


def tex_text(text: str) -> str:
    """``text`` with every sign that TeX would take for its own escaped."""
    return "".join(_TEX.get(sign, sign) for sign in text)
