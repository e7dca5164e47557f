"""Draw loss against operations of a comparison: python docs/drawings/frontier.py STUDY [FOLDER]

The files are light and dark. A line joins dense networks of several widths; a mixture pays if it lies below.
"""

import sys
from itertools import pairwise
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from svg import FOLDER, THEMES, Drawing

from comet_moe.experiments.report.answer import frontier_data
from comet_moe.experiments.studies.reading import read_studies
from comet_moe.experiments.studies.tables import compare_gates

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 600, 380, 70, 30, 40, 60
DENSE, MIXTURE = "faint", {"light": "#0b63a5", "dark": "#7fb0f0"}
TREES = "#3f9b6b"


def draw(data: dict[str, Any]) -> dict[str, str]:
    """The files by name, from what the page of a comparison draws."""
    title = "Test loss x100 by operations per sample: dense networks of several widths, and mixtures"
    files = {}
    for theme in THEMES:
        drawing = Drawing(WIDTH, HEIGHT, theme, title)
        _draw(drawing, data)
        files[f"frontier-{theme}.svg"] = drawing.render()
    return files


def _draw(drawing: Drawing, data: dict[str, Any]) -> None:
    points = data["points"]
    operations = [point["operations"] for point in points.values()]
    losses = [point["loss"] + sign * (point["error"] or 0) for point in points.values() for sign in (-1, 1)]
    start, stop = log10(min(operations)) - 0.08, log10(max(operations)) + 0.22
    step = 10 ** floor(log10(max(losses) - min(losses)))
    low, high = step * floor(min(losses) / step), step * ceil(max(losses) / step)

    def place(point: dict[str, Any]) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (log10(point["operations"]) - start) / (stop - start)
        return x, height(point["loss"])

    def height(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    drawing.text(14, 24, "test loss x100", 15, "faint", "start")
    drawing.text(WIDTH - RIGHT, HEIGHT - 12, "operations per sample", 15, "faint", "end")
    count = round((high - low) / step)
    for tick in range(0, count + 1, 1 + count // 7):
        loss = low + tick * step
        drawing.line(LEFT, height(loss), WIDTH - RIGHT, height(loss), 1, "line")
        drawing.text(LEFT - 8, height(loss) + 5, f"{loss:g}", 14, "faint", "end")
    line = [place(points[name]) for name in data["line"]]
    for first, second in pairwise(line):
        drawing.stroke(*first, *second, 2, DENSE)
    if data["trees"] is not None:
        drawing.stroke(LEFT, height(data["trees"]), WIDTH - RIGHT, height(data["trees"]), 2, TREES)
        drawing.text(LEFT + 6, height(data["trees"]) - 7, "boosted trees", 15, TREES, "start")
    for x_tick in (10**power * digit for power in range(12) for digit in (1, 2, 5)):
        if start <= log10(x_tick) <= stop - 0.1:
            x = place({"operations": x_tick, "loss": low})[0]
            drawing.text(x, HEIGHT - BOTTOM + 20, f"{x_tick:,}", 14, "faint")
    places = {name: place(point) for name, point in points.items()}
    bars = {
        name: (height(point["loss"] + (point["error"] or 0)), height(point["loss"] - (point["error"] or 0)))
        for name, point in points.items()
    }
    taken = [(x - 7, top - 2, x + 7, bottom + 2) for (x, _), (top, bottom) in _pairs(places, bars)]
    for (x1, y1), (x2, y2) in pairwise(line):
        steps = [(x1 + (x2 - x1) * i / 20, y1 + (y2 - y1) * i / 20) for i in range(21)]
        taken += [(x - 1, y - 1, x + 1, y + 1) for x, y in steps]
    if data["trees"] is not None:
        y = height(data["trees"])
        taken += [(LEFT, y - 1, WIDTH - RIGHT, y + 1), (LEFT, y - 20, LEFT + 110, y)]
    for name, (x, y) in places.items():
        color = DENSE if points[name]["isDense"] else MIXTURE[drawing.theme]
        drawing.stroke(x, bars[name][0], x, bars[name][1], 2, color)
        drawing.dot(x, y, 6, color)
        left, top, anchor = _free(x, y, 8.6 * len(name), taken)
        drawing.text(left, top + 5, name, 15, color, anchor)


def _pairs(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(first[name], second[name]) for name in first]


def _free(x: float, y: float, width: float, taken: list[tuple[float, ...]]) -> tuple[float, float, str]:
    """A place for a name near (x, y) that overlaps nothing, if there is one; it is then taken."""
    for down in (0, -20, 20, -40, 40, -60, 60):
        for anchor in ("start", "end"):
            left = x + 11 if anchor == "start" else x - 11 - width
            box = (left, y + down - 9, left + width, y + down + 9)
            if box[0] > LEFT and box[2] < WIDTH - 4 and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                return (left if anchor == "start" else left + width), y + down, anchor
    return x + 11, y, "start"


def _overlap(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    return first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3]


if __name__ == "__main__":
    (study,) = read_studies([Path(sys.argv[1])])
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else FOLDER
    for file, text in draw(frontier_data(compare_gates(study))).items():
        (folder / file).write_text(text, encoding="utf-8")
