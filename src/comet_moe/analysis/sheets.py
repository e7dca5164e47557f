"""A table for readers: rounded figures with their errors, before they are written in any format."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import floor, log10


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
class Sheet:
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
