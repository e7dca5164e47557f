"""Numbers as text, and rounded numbers for the page's data block."""

import math
from collections.abc import Iterable

from comet_moe.experiments.studies import render

NO_BREAK_SPACE = "\u00a0"
MISSING = "-"
"""Text of a missing value."""
SIGNIFICANT_DIGITS = 5
"""Significant digits of the numbers in plots: more than a screen can show."""


def round_number(value: float | None, digits: int = SIGNIFICANT_DIGITS) -> float | None:
    """Round ``value`` to ``digits`` significant digits; None for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded


def round_numbers(values: Iterable[float | None], digits: int = SIGNIFICANT_DIGITS) -> list[float | None]:
    """Round each of ``values`` to ``digits`` significant digits."""
    return [round_number(value, digits) for value in values]


def choose_decimals(errors: Iterable[float | None]) -> int:
    """Decimals that show two digits of the smallest of ``errors``, the standard errors of a column."""
    return render.choose_decimals(errors, digits=2)


def format_mean(mean: float | None, error: float | None, decimals: int) -> str:
    """``mean ± error`` with ``decimals`` digits after the point, or only the mean where the error is None."""
    if mean is None:
        return MISSING
    text = f"{mean:.{decimals}f}"
    return text if error is None else f"{text}{NO_BREAK_SPACE}{format_error(error, decimals)}"


def format_error(error: float, decimals: int) -> str:
    """``± error`` with ``decimals`` digits after the point."""
    return f"±{NO_BREAK_SPACE}{error:.{decimals}f}"


def format_p(p: float | None) -> str:
    """A p-value as in ``comet-moe table``: ``0.012`` or ``< 0.001``."""
    return render.format_p_value(p, NO_BREAK_SPACE) or MISSING


def format_p_equation(p: float) -> str:
    """``p = 0.012`` or ``p < 0.001``."""
    return render.format_p_equation(p, NO_BREAK_SPACE)


def format_scaled(value: float | None) -> str:
    """``value`` in thousands (k), millions (M) or billions (G), with three digits."""
    if value is None:
        return MISSING
    rounded = float(f"{value:.3g}")
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(rounded) >= size:
            return f"{rounded / size:.3g}{unit}"
    return f"{rounded:.3g}"


def format_integer(value: float) -> str:
    """``value`` without decimals and with commas between thousands."""
    return f"{value:,.0f}" if math.isfinite(value) else MISSING


def format_count(number: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
