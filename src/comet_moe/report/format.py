"""Numbers for readers and for the page's data block."""

import math
from collections.abc import Iterable

from comet_moe.analysis import render

SPACE = "\u00a0"
"""At which no line breaks."""

DIGITS = 5
"""Significant digits of what plots show: a pixel is less than a part in ten thousand."""


def brief(value: float | None, digits: int = DIGITS) -> float | None:
    """``value`` to ``digits`` significant ones; None for what is no number."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short


def briefs(values: Iterable[float | None], digits: int = DIGITS) -> list[float | None]:
    """Each of ``values``, brief."""
    return [brief(value, digits) for value in values]


def decimals(errors: Iterable[float | None]) -> int:
    """Places after the point, by the rule of the tables: the page has room for two digits of an error."""
    return render.choose_decimals(errors, digits=2)


def plus_minus(mean: float | None, error: float | None, places: int) -> str:
    """``mean ± error``, without the error where there is none."""
    if mean is None:
        return "-"
    return f"{mean:.{places}f}" if error is None else f"{mean:.{places}f}{SPACE}±{SPACE}{error:.{places}f}"


def p_value(p: float | None) -> str:
    """A probability, by the rule of the tables."""
    return render.format_p_value(p, SPACE) or "-"


def p_said(p: float) -> str:
    """``p = 0.012`` or ``p < 0.001``."""
    said = p_value(p)
    return f"p{SPACE}{said}" if said.startswith("<") else f"p{SPACE}={SPACE}{said}"


def scaled(value: float | None) -> str:
    """``value`` in thousands (k), millions (M) or billions (G)."""
    if value is None:
        return "-"
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def grouped(value: float) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,.0f}" if math.isfinite(value) else "-"


def counted(number: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
