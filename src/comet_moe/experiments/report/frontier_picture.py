"""The frontier as an SVG picture: test loss against operations, as the first plot of a page draws it.

It is for documents, where no script runs. Dense networks are squares, joined by a line with a band of one
standard error. Mixtures are circles with their standard error, and boosted trees a dotted line.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise, product
from typing import Literal

from comet_moe.experiments.report.format import format_scaled
from comet_moe.experiments.report.page import read_asset
from comet_moe.experiments.studies.frontier import Row, frontier
from comet_moe.experiments.studies.networks import gate_of
from comet_moe.experiments.training.records import TREES
from comet_moe.gates.registry import is_dense

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")

WIDTH, HEIGHT = 480, 400
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 40, 52
SIZE = 14
"""Of labels: 11 pixels on a phone, where the picture is 360 wide."""
RADIUS = 5
FONT = "system-ui, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Box:
    """A rectangle of the picture that a label covers or must not."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: "Box") -> float:
        """The area that both have."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0.0) * max(height, 0.0)


def draw_frontier(rows: Sequence[Row], title: str, theme: Theme = "light") -> str:
    """The SVG file; empty if fewer than two networks have a loss and operations."""
    points = [row for row in rows if row["test_loss_mean"] is not None and row["flops_per_sample_mean"]]
    if len(points) < 2:
        return ""
    return _Picture(rows, points, title, theme).svg()


class _Picture:
    """Scales, colours and parts of one picture."""

    def __init__(self, rows: Sequence[Row], points: Sequence[Row], title: str, theme: Theme):
        self.rows, self.points, self.title = rows, points, title
        self.colours = _colours(theme)
        trees = next((row for row in rows if row["gate"] == TREES), None)
        self.trees = None if trees is None else trees["test_loss_mean"]
        ends = [row["test_loss_mean"] + sign * _error(row) for row in points for sign in (-1, 1)]
        spread = max(ends) - min(ends)
        self.side = _side(self.trees, min(ends) - spread, max(ends) + spread)
        ends += [self.trees] if self.trees is not None and not self.side else []
        space = 0.08 * (max(ends) - min(ends)) or 1.0
        self.low, self.high = min(ends) - space, max(ends) + space
        costs = [row["flops_per_sample_mean"] for row in points]
        self.least, self.most = min(costs) / 1.3, max(costs) * 1.3

    def x(self, operations: float) -> float:
        share = math.log(operations / self.least) / math.log(self.most / self.least)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, loss: float) -> float:
        return TOP + (self.high - loss) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)

    def svg(self) -> str:
        body = "\n".join([*self._axes(), *self._line(), *self._points(), *self._labels()])
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" font-family="{FONT}" font-size="{SIZE}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n"
            f'<rect width="100%" height="100%" rx="8" fill="{self.colours["paper"]}"/>\n{body}\n</svg>\n'
        )

    def _text(self, x: float, y: float, words: str, colour: str = "ink", anchor: str = "middle") -> str:
        fill = self.colours.get(colour, colour)
        return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}">{escape(words)}</text>'

    def _rule(self, x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
        stroke = self.colours.get(colour, colour)
        return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{stroke}" fill="none"{more}/>'

    def _axes(self) -> list[str]:
        parts = [self._text(LEFT, 24, "test loss x100", "muted", "start")]
        for tick in _linear_ticks(self.low, self.high):
            parts.append(self._rule(LEFT, self.y(tick), WIDTH - RIGHT, self.y(tick), "line"))
            parts.append(self._text(LEFT - 8, self.y(tick) + 5, f"{tick:g}", "muted", "end"))
        for tick in _log_ticks(self.least, self.most):
            parts.append(
                self._rule(self.x(tick), HEIGHT - BOTTOM, self.x(tick), HEIGHT - BOTTOM + 5, "muted")
            )
            parts.append(self._text(self.x(tick), HEIGHT - BOTTOM + 21, format_scaled(tick), "muted"))
        middle = (LEFT + WIDTH - RIGHT) / 2
        return [*parts, self._text(middle, HEIGHT - 10, "operations per sample", "muted")]

    def _line(self) -> list[str]:
        """The dense networks of several widths, and boosted trees."""
        places = [(self.x(row["flops_per_sample_mean"]), row) for row in frontier(self.rows)]
        colour, parts = _colour("dense", self.colours), []
        if len(places) > 1:
            upper = [(x, self.y(row["test_loss_mean"] + _error(row))) for x, row in places]
            lower = [(x, self.y(row["test_loss_mean"] - _error(row))) for x, row in reversed(places)]
            edge = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *lower])
            path = " ".join(f"{x:.1f},{self.y(row['test_loss_mean']):.1f}" for x, row in places)
            parts.append(f'<polygon points="{edge}" fill="{colour}" fill-opacity="0.18"/>')
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if self.trees is not None and not self.side:
            height, dots = self.y(self.trees), ' stroke-width="2" stroke-dasharray="2 4"'
            parts.append(self._rule(LEFT, height, WIDTH - RIGHT, height, "muted", dots))
        return parts

    def _points(self) -> list[str]:
        parts = []
        for row in self.points:
            x, y = self.x(row["flops_per_sample_mean"]), self.y(row["test_loss_mean"])
            colour, error = _colour(row["gate"], self.colours), _error(row)
            if error:
                ends = (self.y(row["test_loss_mean"] + sign * error) for sign in (1, -1))
                top, bottom = ends
                parts.append(self._rule(x, top, x, bottom, colour, ' stroke-width="2"'))
            if is_dense(row["gate"]):
                corner, side = f'x="{x - RADIUS:.1f}" y="{y - RADIUS:.1f}"', 2 * RADIUS
                parts.append(f'<rect {corner} width="{side}" height="{side}" fill="{colour}"/>')
            else:
                fill = self.colours["paper"] if "+" in row["gate"] else colour
                shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}"'
                parts.append(f'{shape} fill="{fill}" stroke="{colour}" stroke-width="2"/>')
        return parts

    def _labels(self) -> list[str]:
        """The name of each point, where it covers the least of other names and points."""
        taken = [*map(self._box_of_point, self.points), *self._boxes_of_line()]
        parts = []
        if self.trees is not None:
            x, y, words = float(WIDTH - RIGHT), self.y(self.trees) - 6, "boosted trees"
            if self.side:
                y = TOP + SIZE if self.side == "above" else HEIGHT - BOTTOM - 6
                words = f"boosted trees: {self.trees:.2f}, {self.side} this range"
            parts.append(self._text(x, y, words, "muted", "end"))
            taken.append(Box(x - _width(words), y - SIZE, x, y + 4))
        for row in sorted(self.points, key=lambda row: -row["test_loss_mean"]):
            best = min(self._places(row), key=lambda box: self._cost(box, taken))
            taken.append(best)
            is_left = best.right <= self.x(row["flops_per_sample_mean"])
            x, anchor = (best.right, "end") if is_left else (best.left, "start")
            colour = _colour(row["gate"], self.colours)
            parts.append(self._text(x, best.bottom - 4, row["gate"], colour, anchor))
        return parts

    def _boxes_of_line(self) -> Iterable[Box]:
        places = [
            (self.x(row["flops_per_sample_mean"]), self.y(row["test_loss_mean"]))
            for row in frontier(self.rows)
        ]
        for (x1, y1), (x2, y2) in pairwise(places):
            for share in (step / 24 for step in range(25)):
                x, y = x1 + share * (x2 - x1), y1 + share * (y2 - y1)
                yield Box(x - 3, y - 3, x + 3, y + 3)

    def _cost(self, box: Box, taken: Iterable[Box]) -> float:
        outside = max(LEFT - box.left, 0) + max(box.right - WIDTH + 2, 0)
        outside += max(TOP - 12 - box.top, 0) + max(box.bottom - HEIGHT + BOTTOM, 0)
        return sum(box.overlap(other) for other in taken) + 100 * outside

    def _places(self, row: Row) -> Iterable[Box]:
        """Where the name can be, the nearest to its point first."""
        x, y = self.x(row["flops_per_sample_mean"]), self.y(row["test_loss_mean"])
        width, height = _width(row["gate"]), SIZE + 3
        for far, (left, top) in product(
            (0, 16, 32, 48),
            (
                (RADIUS + 3, -height / 2),
                (-RADIUS - 3 - width, -height / 2),
                (-width / 2, -RADIUS - 2 - height),
                (-width / 2, RADIUS + 2),
                (RADIUS, -RADIUS - height),
                (RADIUS, RADIUS),
                (-RADIUS - width, -RADIUS - height),
                (-RADIUS - width, RADIUS),
            ),
        ):
            shift = math.copysign(far, top + height / 2) if top != -height / 2 else 0
            first = x + left + (math.copysign(far, left) if top == -height / 2 else 0)
            yield Box(first, y + top + shift, first + width, y + top + shift + height)

    def _box_of_point(self, row: Row) -> Box:
        x, error = self.x(row["flops_per_sample_mean"]), _error(row)
        top, bottom = (self.y(row["test_loss_mean"] + sign * error) for sign in (1, -1))
        return Box(x - RADIUS, min(top, bottom) - RADIUS, x + RADIUS, max(top, bottom) + RADIUS)


def _side(loss: float | None, low: float, high: float) -> str:
    """Whether a loss is above or below a range; empty if it is neither."""
    return "" if loss is None else "below" if loss < low else "above" if loss > high else ""


def _error(row: Row) -> float:
    return row["test_loss_se"] or 0.0


def _width(text: str) -> float:
    return 0.56 * SIZE * len(text) + 2


def _colours(theme: Theme) -> dict[str, str]:
    """The colours of the page by name, such as "ink" and "gate-comet"."""
    light, _, dark = read_asset("page.css").partition("@media screen and (prefers-color-scheme: dark)")
    named = re.compile(r"--([a-z-]+): (#[0-9a-f]{6})")
    colours = dict(named.findall(light.partition("* {")[0]))
    return colours if theme == "light" else colours | dict(named.findall(dark.partition("* {")[0]))


def _colour(gate: str, colours: dict[str, str]) -> str:
    family = gate_of(gate).partition(",")[0].removesuffix("+")
    if is_dense(family) and f"gate-{family}" not in colours:
        family = "dense"
    return colours.get(f"gate-{family}", colours["gate-other"])


def _linear_ticks(low: float, high: float) -> list[float]:
    """At most six or seven round numbers between the ends."""
    raw = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [round(step * number, 10) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Multiples of powers of ten, as many as there is space for."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        shown = [tick for tick in ticks if low <= tick <= high]
        if len(shown) <= 6:
            break
    return shown
