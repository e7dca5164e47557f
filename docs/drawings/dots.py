"""A plot of dots with intervals around zero, one row per comparison."""

from collections.abc import Sequence
from dataclasses import dataclass

from svg import THEMES, Drawing

WIDTH, LEFT, RIGHT, TOP, STEP = 600, 240, 36, 64, 50
SIDES = {"light": ("#1f7a4d", "#b4471a"), "dark": ("#5fc98f", "#f08a5d")}
"""Colours of the two sides of zero, for intervals that do not reach it."""


@dataclass(frozen=True)
class Dot:
    """A row: two lines of text, a value and its interval."""

    name: str
    note: str
    value: float
    low: float
    high: float


def draw_dots(
    name: str, title: str, dots: Sequence[Dot], limits: tuple[int, int], sides: tuple[str, str]
) -> dict[str, str]:
    """The files of the plot by name, light and dark; ``sides`` say what lies left and right of zero."""
    files = {}
    for theme in THEMES:
        drawing = Drawing(WIDTH, TOP + STEP * len(dots) + 46, theme, title)
        _draw(drawing, dots, limits, sides)
        files[f"{name}-{theme}.svg"] = drawing.render()
    return files


def _draw(drawing: Drawing, dots: Sequence[Dot], limits: tuple[int, int], sides: tuple[str, str]) -> None:
    lowest, highest = limits
    bottom = TOP + STEP * len(dots)

    def place(value: float) -> float:
        share = (min(max(value, lowest), highest) - lowest) / (highest - lowest)
        return LEFT + (WIDTH - LEFT - RIGHT) * share

    left, right = SIDES[drawing.theme]
    drawing.text(place(0) - 10, 34, f"← {sides[0]}", 15, left, "end")
    drawing.text(place(0) + 10, 34, f"{sides[1]} →", 15, right, "start")
    for tick in range(lowest, highest + 1, 10):
        drawing.line(place(tick), TOP - 14, place(tick), bottom, 2 if tick == 0 else 1, "line")
        drawing.text(place(tick), bottom + 24, f"{tick:+d} %" if tick else "0", 15, "faint")
    for i, dot in enumerate(dots):
        y = TOP + STEP * i + 14
        color = left if dot.high < 0 else right if dot.low > 0 else "ink"
        drawing.text(14, y - 3, dot.name, 16, anchor="start")
        drawing.text(14, y + 16, dot.note, 14, "faint", "start")
        drawing.line(place(dot.low), y, place(dot.high), y, 3, color)
        drawing.dot(place(dot.value), y, 6, color)
