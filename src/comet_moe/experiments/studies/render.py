"""Tables as text: Markdown, TeX, CSV, and for the terminal.

A ``TextTable`` holds rounded numbers with their errors; each format is a function of it. What the tables of
studies contain is in :mod:`comet_moe.experiments.studies.text_tables`.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class TextCell:
    """``text`` ± ``error``, bold or not, with an asterisk or not; ``tex`` replaces the text in TeX."""

    text: str
    error: str | None = None
    bold: bool = False
    starred: bool = False
    tex: str | None = None


@dataclass(frozen=True)
class TextColumn:
    """The heading of a column, and its heading in TeX; TeX leaves out a column without one.

    A terminal that is too narrow leaves out columns with a ``detail``, the largest one first.
    """

    name: str
    tex: str | None = None
    detail: int = 0


@dataclass(frozen=True)
class TextTable:
    """Rows of cells under a title."""

    title: str
    columns: list[TextColumn]
    rows: list[list[TextCell]]


EMPTY = TextCell("")


def choose_decimals(errors: Iterable[float | None], least: int = 2, digits: int = 1) -> int:
    """Decimal places that show the first ``digits`` digits of the smallest error; from ``least`` to 6."""
    return min(max([least, *(digits - 1 - floor(log10(error)) for error in errors if error)]), 6)


def number_cell(
    mean: float | None, error: float | None, places: int, bold: bool = False, starred: bool = False
) -> TextCell:
    """``mean`` ± ``error`` rounded to ``places``; an empty cell without a mean."""
    if mean is None:
        return EMPTY
    rounded = None if error is None else f"{error:.{places}f}"
    return TextCell(f"{mean:.{places}f}", rounded, bold, starred)


def format_p_value(p: float | None, space: str = "") -> str:
    """Three decimal places, "<0.001" with ``space`` after the sign below that; empty for None."""
    return "" if p is None else f"<{space}0.001" if p < 0.001 else f"{p:.3f}"


def format_p_equation(p: float, space: str = " ") -> str:
    """``p = 0.012`` or ``p < 0.001``, within a sentence."""
    text = format_p_value(p, space)
    return f"p{space}{text}" if text.startswith("<") else f"p{space}={space}{text}"


def to_markdown(table: TextTable) -> str:
    """The title in bold, and a pipe table."""
    heading = [escape_markdown(column.name) for column in table.columns]
    cells = [heading, ["---"] * len(heading), *(map(_markdown_cell, row) for row in table.rows)]
    lines = [f"**{escape_markdown(table.title)}**", "", *map(_join_cells, cells)]
    return "\n".join(lines) + "\n"


def to_tex(tables: Sequence[TextTable], notes: Sequence[str]) -> str:
    r"""One ``tabular`` that needs no package, with one block per table, as in the paper.

    The tables have the same columns; their titles are in the first. ``notes`` are comments above.
    """
    shown = [index for index, column in enumerate(tables[0].columns) if column.tex is not None]
    heading = " & ".join(["Dataset", *(tables[0].columns[index].tex or "" for index in shown)])
    lines = [rf"\begin{{tabular}}{{|l|{'l|' * len(shown)}}}", r"\hline", rf"{heading} \\ \hline"]
    for table in tables:
        titles = [escape_tex(table.title), *[""] * (len(table.rows) - 1)]
        ends = [*[r"\\"] * (len(table.rows) - 1), r"\\ \hline"]
        for title, row, end in zip(titles, table.rows, ends, strict=True):
            lines.append(f"{' & '.join([title, *(_tex_cell(row[index]) for index in shown)])} {end}")
    return "\n".join([*(f"% {note}" for note in notes), *lines, r"\end{tabular}"]) + "\n"


def to_csv(rows: list[dict[str, Any]]) -> str:
    """CSV in full precision: a column for every key of any row, in their order; empty for None."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def flatten_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a comparison as CSV needs it, without dictionaries in it.

    ``metrics`` become columns ``NAME_mean`` and ``NAME_se``, ``routing`` columns such as
    ``TASK.information_mean`` and ``TASK.verdict``.
    """
    flat = {name: value for name, value in row.items() if not isinstance(value, dict)}
    for metric, parts in row["metrics"].items():
        flat |= {f"{metric}_{part}": value for part, value in parts.items()}
    for owner, parts in row["routing"].items():
        flat |= {f"{owner}.{name}": value for name, value in parts.items() if name != "verdicts"}
    return flat


def to_rich(table: TextTable, width: int) -> Table:
    """A table that rich prints on a terminal of ``width`` characters, without the details that do not fit.

    A detail without any value is left out too.
    """
    lines = [[Text(column.name) for column in table.columns]]
    lines += [[_rich_cell(cell) for cell in row] for row in table.rows]
    widths = [max(text.cell_len for text in column) + 3 for column in zip(*lines, strict=True)]  # and a line
    has_text = [any(row[place].text for row in table.rows) for place in range(len(widths))]
    shown = [place for place, column in enumerate(table.columns) if has_text[place] or not column.detail]
    while sum(widths[place] for place in shown) + 2 > width:
        place = max(shown, key=lambda place: table.columns[place].detail)
        if not table.columns[place].detail:
            break
        shown.remove(place)
    missing = [
        column.name for place, column in enumerate(table.columns) if has_text[place] and place not in shown
    ]
    printed = Table(title=Text(table.title), title_justify="left", box=SIMPLE_HEAD, caption_justify="left")
    printed.caption = f"Too narrow for: {', '.join(missing)}." if missing else None
    for place in shown:
        printed.add_column(lines[0][place], justify="right")
    for line in lines[1:]:
        printed.add_row(*(line[place] for place in shown))
    return printed


def escape_markdown(text: str) -> str:
    """``text`` with Markdown's special characters escaped."""
    return re.sub(r"([\\|*_`<>])", r"\\\1", text)


_TEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    **{character: "\\" + character for character in "&%$#_{}"},
}


def escape_tex(text: str) -> str:
    """``text`` with TeX's special characters escaped."""
    return "".join(_TEX_ESCAPES.get(character, character) for character in text)


def _join_cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_cell(cell: TextCell) -> str:
    text = escape_markdown(cell.text)
    return ("\\* " if cell.starred else "") + (f"**{text}**" if cell.bold else text) + _format_error(cell)


def _rich_cell(cell: TextCell) -> Text:
    text = ("* " if cell.starred else "") + cell.text + _format_error(cell)
    return Text(text, style="bold" if cell.bold else "")


def _format_error(cell: TextCell) -> str:
    return "" if cell.error is None else f" ± {cell.error}"


def _tex_cell(cell: TextCell) -> str:
    if cell.error is None and not (cell.bold or cell.starred):
        return escape_tex(cell.tex or cell.text)
    star = "{}^*" if cell.starred else ""
    mean = rf"\mathbf{{{cell.text}}}" if cell.bold else cell.text
    error = "" if cell.error is None else rf"\pm{cell.error}"
    return f"${star}{mean}{error}$"
