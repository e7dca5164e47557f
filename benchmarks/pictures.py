"""Pictures of results as SVG files, light and dark: the gate's time against n, steps against a peer's."""

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from benchmarks.gates import GATE
from benchmarks.peers import INFERENCE, STEP
from benchmarks.result import Result

THEMES = {
    "light": {
        "ink": "#1a1f26",
        "line": "#c3cad4",
        "ground": "#ffffff",
        "ours": "#3b6fb6",
        "other": "#b4681a",
    },
    "dark": {"ink": "#e7ebf0", "line": "#48525f", "ground": "#14181d", "ours": "#7fb0f0", "other": "#f0a955"},
}
FONT = "system-ui, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
Colours = dict[str, str]


def draw_results(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write the pictures that ``results`` are enough for; returns the files."""
    paths = []
    for name, draw in (("gate-time", _draw_gate), ("peer-time", _draw_peers)):
        for theme, colours in THEMES.items():
            picture = draw(results, colours)
            if picture:
                folder.mkdir(parents=True, exist_ok=True)
                paths.append(folder / f"{name}-{theme}.svg")
                paths[-1].write_text(picture, encoding="utf-8")
    return paths


def _draw_gate(results: Sequence[Result], colours: Colours) -> str:
    """One panel per batch size: time of a call against n, both axes logarithmic."""
    panels: dict[int, list[tuple[int, float, float]]] = {}
    for result in results:
        if result.measurement == GATE and result.ratio:
            case = dict(part.split("=") for part in result.case.split())
            if case["p"] == "256":
                point = int(case["n"]), result.ratio.seconds, result.ratio.reference_seconds
                panels.setdefault(int(case["B"]), []).append(point)
    panels = {rows: points for rows, points in panels.items() if len(points) > 1}
    if not panels:
        return ""
    width, height, parts = 300, 300, []
    for i, (rows, points) in enumerate(panels.items()):
        parts += _draw_panel(60 + i * (width + 40), 50, width - 40, height - 110, rows, points, colours)
    title = "Time of one call of the COMET gate and of the Top-k gate against the number of experts"
    return _svg(20 + len(panels) * (width + 40), height, title, parts, colours)


def _draw_panel(
    left: float,
    top: float,
    width: float,
    height: float,
    rows: int,
    points: list[tuple[int, float, float]],
    colours: Colours,
) -> list[str]:
    times = [1e6 * seconds for point in points for seconds in point[1:]]
    x = _axis([n for n, _, _ in points], left, width, False)
    low, high = 10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times)))
    y = _axis([low, high], top, height, True)
    parts = [_text(left, top - 20, f"batch of {rows}, p = 256", colours["ink"], "start", 15)]
    tick = low
    while tick <= high:
        parts.append(_line([(left, y(tick)), (left + width, y(tick))], colours["line"], 1))
        label = f"{tick:,.0f} µs" if tick < 1000 else f"{tick / 1000:,.0f} ms"
        parts.append(_text(left - 6, y(tick) + 4, label, colours["ink"], "end"))
        tick *= 10
    for n, _, _ in points:
        parts.append(_text(x(n), top + height + 18, f"{n:,}", colours["ink"], size=11))
    parts.append(_text(left + width / 2, top + height + 38, "experts", colours["ink"]))
    for index, name, colour in ((1, "COMET", "ours"), (2, "Top-k", "other")):
        path = [(x(point[0]), y(1e6 * point[index])) for point in points]
        parts.append(_line(path, colours[colour], 2.5))
        above = points[-1][index] == max(points[-1][1:])
        parts.append(
            _text(path[-1][0], path[-1][1] + (-8 if above else 24), name, colours[colour], "end", 14)
        )
    return parts


def _draw_peers(results: Sequence[Result], colours: Colours) -> str:
    """Bars: the peer's time and ours, for a training step and for inference."""
    groups = []
    for measurement, words in (
        (STEP, "training step, batch 512"),
        (INFERENCE, "inference, batch 4096"),
    ):
        found = [result for result in results if result.measurement == measurement and result.ratio]
        times = [
            (f"ours, {result.case.split(',')[0]}", result.ratio.seconds) for result in found if result.ratio
        ]
        if times and found[0].ratio:
            groups.append((words, [("torch-rechub's MMOE", found[0].ratio.reference_seconds), *times]))
    if not groups:
        return ""
    parts, y = [], 36
    for words, times in groups:
        parts.append(_text(20, y, words, colours["ink"], "start", 15))
        slowest = max(seconds for _, seconds in times)
        for i, (name, seconds) in enumerate(times):
            y += 30
            parts.append(_text(180, y, name, colours["ink"], "end"))
            bar = 330 * seconds / slowest
            colour = colours["other" if i == 0 else "ours"]
            parts.append(f'<rect x="190" y="{y - 15}" width="{bar:.1f}" height="20" rx="3" fill="{colour}"/>')
            parts.append(_text(198 + bar, y, f"{1e3 * seconds:.1f} ms", colours["ink"], "start"))
        y += 44
    title = "Times of the MovieLens network of this library and of torch-rechub's MMOE of the same sizes"
    return _svg(620, y - 20, title, parts, colours)


def _axis(
    values: Sequence[float], start: float, length: float, is_vertical: bool
) -> Callable[[float], float]:
    """The position of a value on a logarithmic axis over the range of ``values``."""
    low, high = math.log(min(values)), math.log(max(values))

    def position(value: float) -> float:
        share = (math.log(value) - low) / (high - low)
        return start + length * (1 - share if is_vertical else share)

    return position


def _line(points: Sequence[tuple[float, float]], colour: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, words: str, colour: str, anchor: str = "middle", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def _svg(width: float, height: float, title: str, parts: list[str], colours: Colours) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="{FONT}" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect width="100%" height="100%" rx="8" fill="{colours["ground"]}"/>\n{body}\n</svg>\n'
    )
