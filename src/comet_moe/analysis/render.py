"""A table for readers: rounded figures with their errors, before they are written in any format.

Tables as text: Markdown, TeX, CSV, and for the terminal.

The rows of studies as the paper's table: test loss, experts a sample, metrics, p-values.

Curves and tuning-reduction factors as sheets.
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

from comet_moe.analysis.stats import by_metric
from comet_moe.analysis.study import Study


@dataclass(frozen=True)
class Cell:
    """``text`` ± ``error``, bold or not, with an asterisk or not; ``in_paper`` replaces the text in TeX."""

    text: str
    error: str | None = None
    bold: bool = False
    starred: bool = False
    in_paper: str | None = None


@dataclass(frozen=True)
class Column:
    """The heading of a column, and the one it has in TeX; without that TeX leaves the column out."""

    name: str
    tex: str | None = None


@dataclass(frozen=True)
class TextTable:
    """Rows of cells under a title."""

    title: str
    columns: list[Column]
    rows: list[list[Cell]]


EMPTY = Cell("")


def decimals(errors: Iterable[float | None], least: int = 2, digits: int = 1) -> int:
    """Places after the point that show the smallest error's first ``digits``; from ``least`` to 6."""
    return min(max([least, *(digits - 1 - floor(log10(error)) for error in errors if error)]), 6)


def number(
    mean: float | None, error: float | None, places: int, bold: bool = False, starred: bool = False
) -> Cell:
    """``mean`` ± ``error`` rounded to ``places``; an empty cell without a mean."""
    if mean is None:
        return EMPTY
    rounded = None if error is None else f"{error:.{places}f}"
    return Cell(f"{mean:.{places}f}", rounded, bold, starred)


def p_value(p: float | None, space: str = "") -> str:
    """Three places; smaller ones only as below, with ``space`` after the sign; nothing for None."""
    return "" if p is None else f"<{space}0.001" if p < 0.001 else f"{p:.3f}"


_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    **{sign: "\\" + sign for sign in "&%$#_{}"},
}


def markdown(sheet: TextTable) -> str:
    """The title in bold, and a pipe table."""
    lines = [f"**{markdown_text(sheet.title)}**", ""]
    lines += [
        _piped(markdown_text(column.name) for column in sheet.columns),
        _piped("---" for _ in sheet.columns),
    ]
    return "\n".join([*lines, *(_piped(map(_markdown_cell, row)) for row in sheet.rows)]) + "\n"


def tex(sheets: Sequence[TextTable], notes: Sequence[str]) -> str:
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


def terminal(sheet: TextTable) -> Table:
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


Row = dict[str, Any]

_IN_PAPER = {
    "softmax": "Softmax",
    "hash": "Hash-r",
    "topk": "Top-k",
    "dselect": "DSelect-k",
    "comet": "COMET",
}
_ALL = "Mean ± standard error over the trials used. Bold: the lowest mean of the study."
_TUNING = (
    "Tuning: over the best {top:g} % of the trials by validation loss; * where a gate is below the best "
    "existing one (softmax, hash, topk, dselect) with p < 0.05 in Student's one-sided t-test."
)
_OTHER = (
    "Ablation or plain runs: over all complete trials; * where a gate with local search is below itself "
    "without with p < 0.05 in Welch's one-sided t-test."
)


def result_tables(found: Sequence[tuple[Study, list[Row]]]) -> list[TextTable]:
    """A sheet a study, all of the same columns, from studies and their ``gate_rows``."""
    metrics = list(
        dict.fromkeys(name for _, rows in found for row in rows for name in by_metric(row["metrics"]))
    )
    columns = [
        Column("n", "$n$"),
        Column("gate", "Gate"),
        Column("used/complete"),
        Column("failed"),
        Column("test loss x100", r"Test Loss ($\times100$) $\downarrow$"),
        Column("experts", r"$n/s$ $\downarrow$"),
        *(Column(name, tex_text(name)) for name in metrics),
        Column("p existing"),
        Column("p search"),
    ]
    return [TextTable(study.title, columns, _cells(study, rows, metrics)) for study, rows in found]


def table_notes(studies: Sequence[Study], top: float) -> list[str]:
    """How to read the sheets."""
    kinds = {study.kind == "tuning" for study in studies}
    tuning = [_TUNING.format(top=top)] if True in kinds else []
    other = [_OTHER] if False in kinds else []
    return [_ALL, *tuning, *other]


def _cells(study: Study, rows: list[Row], metrics: list[str]) -> list[list[Cell]]:
    places = decimals(row["test_loss_se"] for row in rows)
    return [
        [
            Cell("" if study.experts is None else str(study.experts)),
            _gate(row["gate"]),
            Cell(f"{row['trials_used']}/{row['trials_complete']}"),
            Cell(str(row["trials_failed"] or "")),
            number(row["test_loss_mean"], row["test_loss_se"], places, row["lowest"], row["asterisk"]),
            number(row["experts_per_sample_mean"], row["experts_per_sample_se"], 2),
            *(_metric(rows, row, name) for name in metrics),
            Cell(_existing(row)),
            Cell(p_value(row["p_search"])),
        ]
        for row in rows
    ]


def _gate(name: str) -> Cell:
    plain = name.removesuffix("+")
    return Cell(name, in_paper=_IN_PAPER.get(plain, plain) + ("+" if name.endswith("+") else ""))


def _metric(rows: list[Row], row: Row, name: str) -> Cell:
    over_gates = [by_metric(other["metrics"]).get(name) for other in rows]
    places = decimals((found["se"] for found in over_gates if found), least=4)
    own = by_metric(row["metrics"]).get(name)
    return number(own["mean"], own["se"], places) if own else EMPTY


def _existing(row: Row) -> str:
    p = p_value(row["p_existing"])
    return f"{p} ({row['best_existing']})" if p else ""


CURVE_NOTE = (
    "Test loss x100 of the best of so many trials by validation loss: its expectation, and where the middle "
    "90 % of the draws lie."
)
REDUCTION_NOTE = (
    "loss: what the rival comes to with its budget, half of its trials or all; trials: the fewest with which "
    "either gets there; factor: the rival's over the gate's; 95 %, never: over resamples of the trials."
)


def curve_table(study: Study, rows: list[Row]) -> TextTable:
    """A column a gate, a line a budget (``curve_rows``)."""
    gates = list(dict.fromkeys(row["gate"] for row in rows))
    found = {(row["gate"], row["budget"]): row for row in rows}
    places = decimals(row["mean_se"] for row in rows if row["budget"] == 1)
    lines = [
        [Cell(str(budget)), *(_loss(found.get((gate, budget)), places) for gate in gates)]
        for budget in sorted({row["budget"] for row in rows})
    ]
    return TextTable(study.title, [Column("trials"), *map(Column, gates)], lines)


def reduction_table(study: Study, rows: list[Row]) -> TextTable:
    """Two lines a pair of gates, at half and at all of the rival's budget (``reduction_rows``)."""
    budgets: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        budgets.setdefault((row["gate"], row["rival"]), []).append(row)
    names = ("gate", "rival", "budget", "loss", "rival's trials", "gate's trials", "factor", "95 %", "never")
    lines = [_reduction(row) for of_pair in budgets.values() for row in _half_and_all(of_pair)]
    return TextTable(f"{study.title}: tuning reduction", [Column(name) for name in names], lines)


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
