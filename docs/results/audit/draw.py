"""The picture of docs/results/audit: python docs/results/audit/draw.py, from the repository's root.

Reads the JSON of each audit in its folder, and writes ``gains.svg`` there.
"""

import json
import math

from table import FOLDER, MODELS

LEFT, RIGHT, ROW, WIDTH = 190, 30, 26, 760
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1a1f26 }
.muted { fill: #5a6472 } .title { font-weight: 600 }
.axis { stroke: #d9dee5 } .zero { stroke: #5a6472 }
.gain { stroke: #00598c; fill: #00598c } .gap { stroke: #b04a00; fill: none }
line.gain, line.gap { stroke-width: 2 } rect.gap { stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e7ebf0 } .muted { fill: #a0abb8 }
  .axis { stroke: #333c47 } .zero { stroke: #a0abb8 }
  .gain { stroke: #7cc4f2; fill: #7cc4f2 } .gap { stroke: #f0a060; fill: none }
}
"""
KINDS = {"gain": ("routing_gain", "routes exchanged"), "gap": ("gap_to_random", "random routes")}


def main() -> None:
    """Draw one row per mixture."""
    reports = {
        name: json.loads((FOLDER / f"{file}.json").read_text())
        for file, name in MODELS.items()
        if (FOLDER / f"{file}.json").is_file()
    }
    ends = [
        end
        for report in reports.values()
        for layer in report["layers"]
        for key, _ in KINDS.values()
        for end in layer[key]["interval"]
    ]
    step = 10 ** math.floor(math.log10(max(ends)))
    step = step if max(ends) / step > 3 else step / 2
    low, high = min(0.0, math.floor(min(ends) / step) * step), math.ceil(max(ends) / step) * step

    def x(value: float) -> float:
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    parts, y = [], 34
    for name, report in reports.items():
        parts.append(f'<text class="title" x="0" y="{y + 18}">{name}</text>')
        for number, layer in enumerate(report["layers"]):
            middle = y + ROW // 2
            parts.append(f'<text x="{LEFT - 12}" y="{middle + 5}" text-anchor="end">layer {number}</text>')
            for shift, (kind, (key, _)) in zip((-4, 4), KINDS.items(), strict=True):
                a, b = (x(end) for end in layer[key]["interval"])
                at, v = middle + shift, x(layer[key]["gain"])
                parts.append(f'<line class="{kind}" x1="{a:.1f}" x2="{b:.1f}" y1="{at}" y2="{at}"/>')
                parts.append(_marker(kind, v, at))
            y += ROW
        y += 14
    ticks = [low + step * i for i in range(round((high - low) / step) + 1)]
    grid = [
        f'<line class="{"zero" if abs(tick) < step / 2 else "axis"}" x1="{x(tick):.1f}" x2="{x(tick):.1f}" '
        f'y1="30" y2="{y - 8}"/><text class="muted" x="{x(tick):.1f}" y="{y + 8}" text-anchor="middle">'
        f"{tick:.3g}</text>"
        for tick in ticks
    ]
    legend, place = [], LEFT
    for kind, (_, text) in KINDS.items():
        legend += [_marker(kind, place, 14), f'<text x="{place + 12}" y="19">{text}</text>']
        place += 170
    unit = "rise of the loss in nats per byte, with 95 % intervals"
    foot = f'<text class="muted" x="{LEFT}" y="{y + 30}">{unit}</text>'
    (FOLDER / "gains.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 38}" role="img" '
        f'aria-label="Rise of the loss with other routes, by model and layer">\n<style>{STYLE}</style>\n'
        + "\n".join([*grid, *legend, *parts, foot])
        + "\n</svg>\n"
    )


def _marker(kind: str, x: float, y: float) -> str:
    if kind == "gain":
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{y}" r="4"/>'
    return f'<rect class="{kind}" x="{x - 4:.1f}" y="{y - 4}" width="8" height="8"/>'


if __name__ == "__main__":
    main()
