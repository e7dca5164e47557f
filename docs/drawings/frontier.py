"""Draw loss against operations of a comparison, light and dark: python docs/drawings/frontier.py STUDY [FOLDER]

Dense networks of several widths are joined by a line; a mixture pays if it lies below it.
"""

import sys
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
NEAR = 18
"""Pixels between the names of two networks at least."""


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
    drawing.text(WIDTH - RIGHT, HEIGHT - 14, "operations per sample (logarithmic)", 15, "faint", "end")
    for tick in range(round((high - low) / step) + 1):
        loss = low + tick * step
        drawing.line(LEFT, height(loss), WIDTH - RIGHT, height(loss), 1, "line")
        drawing.text(LEFT - 8, height(loss) + 5, f"{loss:g}", 14, "faint", "end")
    line = [place(points[name]) for name in data["line"]]
    for first, second in zip(line, line[1:], strict=False):
        drawing.stroke(*first, *second, 2, DENSE)
    taken: list[float] = []
    for name, point in sorted(points.items(), key=lambda item: item[1]["loss"]):
        color = DENSE if point["isDense"] else MIXTURE[drawing.theme]
        x, y = place(point)
        if point["error"]:
            top, bottom = height(point["loss"] + point["error"]), height(point["loss"] - point["error"])
            drawing.stroke(x, top, x, bottom, 2, color)
        drawing.dot(x, y, 6, color)
        words = y
        while any(abs(words - other) < NEAR for other in taken):
            words -= 2
        taken.append(words)
        drawing.text(x + 11, words + 5, name, 15, color, "start")


if __name__ == "__main__":
    (study,) = read_studies([Path(sys.argv[1])])
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else FOLDER
    for file, text in draw(frontier_data(compare_gates(study))).items():
        (folder / file).write_text(text, encoding="utf-8")
