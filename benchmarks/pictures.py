"""Pictures of results as SVG files, light and dark: times of gates against n, steps against a peer's."""

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from benchmarks.gates import GATE
from benchmarks.growth import TRAINING
from benchmarks.peers import INFERENCE, STEP
from benchmarks.result import Result

THEMES = {
    "light": {
        "ink": "#1a1f26",
        "line": "#c3cad4",
        "ground": "#ffffff",
        "ours": "#3b6fb6",
        "other": "#b4681a",
        "third": "#3f8f63",
    },
    "dark": {"ink": "#e7ebf0", "line": "#48525f", "ground": "#14181d", "ours": "#7fb0f0", "other": "#f0a955"},
}
THEMES["dark"]["third"] = "#7fd0a3"
LINES = {"COMET": "ours", "Top-k": "other", "product keys": "third"}
"""The colour of each gate."""
FONT = "system-ui, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
Colours = dict[str, str]


def draw_results(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write the pictures that ``results`` are enough for; returns the files."""
    paths = []
    for name, draw in (
        ("gate-time", _draw_gate),
        ("training-time", _draw_training),
        ("peer-time", _draw_peers),
    ):
        for theme, colours in THEMES.items():
            picture = draw(results, colours)
            if picture:
                folder.mkdir(parents=True, exist_ok=True)
                paths.append(folder / f"{name}-{theme}.svg")
                paths[-1].write_text(picture, encoding="utf-8")
    return paths


Times = dict[str, dict[int, float]]
"""Seconds by gate and number of experts."""


def _draw_gate(results: Sequence[Result], colours: Colours) -> str:
    """One panel per batch size: time of a call against n, both axes logarithmic."""
    panels: dict[str, Times] = {}
    for result in results:
        if result.measurement == GATE and result.ratio:
            case = _read_case(result)
            if case["p"] == "256":
                times = panels.setdefault(f"batch of {case['B']}, p = 256", {"COMET": {}, "Top-k": {}})
                times["COMET"][int(case["n"])] = result.ratio.seconds
                times["Top-k"][int(case["n"])] = result.ratio.reference_seconds
    title = "Time of one call of the COMET gate and of the Top-k gate against the number of experts"
    return _draw_panels(panels, title, 300, colours)


def _draw_training(results: Sequence[Result], colours: Colours) -> str:
    """Time of a training pass of three gates against n."""
    times: Times = {}
    for gate, measurement in TRAINING.items():
        for result in results:
            if result.measurement == measurement and result.ratio:
                n = int(_read_case(result)["n"])
                times.setdefault(gate, {})[n] = result.ratio.seconds
                times.setdefault("Top-k", {})[n] = result.ratio.reference_seconds
    title = "Time of a training pass of the COMET, product key and Top-k gates against the number of experts"
    return _draw_panels({"training pass, batch of 1024, p = 256": times}, title, 480, colours)


def _read_case(result: Result) -> dict[str, str]:
    """The ``name=value`` words of a case."""
    words = [word.rstrip(",").split("=") for word in result.case.split()]
    return {word[0]: word[1] for word in words if len(word) == 2}


def _draw_panels(panels: dict[str, Times], title: str, width: int, colours: Colours) -> str:
    """Panels side by side; nothing if no gate has two points."""
    panels = {name: times for name, times in panels.items() if any(len(line) > 1 for line in times.values())}
    if not panels:
        return ""
    height, parts = 300, []
    for i, (name, times) in enumerate(panels.items()):
        parts += _draw_panel(60 + i * (width + 40), 50, width - 40, height - 110, name, times, colours)
    return _svg(20 + len(panels) * (width + 40), height, title, parts, colours)


def _draw_panel(
    left: float, top: float, width: float, height: float, name: str, times: Times, colours: Colours
) -> list[str]:
    experts = sorted({n for line in times.values() for n in line})
    all_times = [1e6 * seconds for line in times.values() for seconds in line.values()]
    x = _axis(experts, left, width, False)
    low, high = 10 ** math.floor(math.log10(min(all_times))), 10 ** math.ceil(math.log10(max(all_times)))
    y = _axis([low, high], top, height, True)
    parts = [_text(left, top - 20, name, colours["ink"], "start", 15)]
    tick = low
    while tick <= high:
        parts.append(_line([(left, y(tick)), (left + width, y(tick))], colours["line"], 1))
        factor, unit = next(pair for pair in ((1e6, "s"), (1e3, "ms"), (1, "µs")) if tick >= pair[0])
        label = f"{tick / factor:.0f} {unit}"
        parts.append(_text(left - 6, y(tick) + 4, label, colours["ink"], "end"))
        tick *= 10
    for n in experts:
        parts.append(_text(x(n), top + height + 18, f"{n:,}", colours["ink"], size=11))
    parts.append(_text(left + width / 2, top + height + 38, "experts", colours["ink"]))
    lowest = min(line[max(line)] for line in times.values())
    for gate, line in times.items():
        path = [(x(n), y(1e6 * line[n])) for n in sorted(line)]
        parts.append(_line(path, colours[LINES[gate]], 2.5))
        below = 24 if line[max(line)] == lowest else -8
        parts.append(_text(path[-1][0], path[-1][1] + below, gate, colours[LINES[gate]], "end", 14))
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
