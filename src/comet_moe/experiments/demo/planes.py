"""The plane of a made-up table by the expert that each point gets: as letters, and as an SVG."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from comet_moe.experiments.data.table.encode import Encoder
from comet_moe.experiments.demo.tables import COLUMNS, Array
from comet_moe.experiments.models.base import read_schema
from comet_moe.experiments.training.recipe import load_run

COLORS = ("#3b6fb6", "#e08a2e", "#3f9b6b", "#a8498f")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SIDE = 240
"""Width and height of a drawn plane."""


def grid(rows: int, columns: int) -> Array:
    """The centers of the cells of [-1, 1]², from the top left on: (rows · columns, 2)."""
    x, y = (2 * (np.arange(size) + 0.5) / size - 1 for size in (columns, rows))
    return np.stack([np.tile(x, rows), np.repeat(-y, columns)], 1)


@torch.no_grad()
def experts_on_plane(run: Path, rows: int, columns: int) -> Array:
    """The expert with the largest weight at each cell, by the first gate of a run: (rows, columns)."""
    loaded = load_run(run)
    points = grid(rows, columns)
    batch = pa.RecordBatch.from_pydict(dict(zip(COLUMNS, points.T, strict=True)))
    features = Encoder(read_schema(loaded.meta)).features(batch, False)
    _, routings = loaded.model({name: torch.from_numpy(array) for name, array in features.items()})
    return routings[0].weights.argmax(-1).reshape(rows, columns).numpy()


def as_letters(experts: Array) -> list[str]:
    """A line of letters per row of (rows, columns) experts."""
    return ["".join(LETTERS[expert] for expert in row) for row in experts]


def as_svg(values: Array, experts: Array, title: str) -> str:
    """Two planes side by side: the target in shades, and the experts in colors."""
    low, high = values.min(), values.max()
    shades = [[f"{(value - low) / (high - low):.1f}" for value in row] for row in values]
    gray = 'fill="currentColor" fill-opacity='
    parts = [
        _words(SIDE / 2, "the target"),
        *(f'<path d="{path}" {gray}"{shade}"/>' for path, shade in _runs(shades, 0)),
        _words(1.5 * SIDE + 30, "the expert of each point"),
        *(f'<path d="{path}" fill="{color}"/>' for path, color in _runs(_colors(experts), SIDE + 30)),
    ]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * SIDE + 30} {SIDE + 26}" role="img" '
        f'font-family="system-ui, sans-serif" style="width: 100%; max-width: 34rem">\n'
        f"<title>{escape(title)}</title>\n"
        f"{body}\n</svg>"
    )


def _words(x: float, words: str) -> str:
    return f'<text x="{x}" y="15" text-anchor="middle" font-size="15" fill="currentColor">{words}</text>'


def _colors(experts: Array) -> list[list[str]]:
    return [[COLORS[expert % len(COLORS)] for expert in row] for row in experts]


def _runs(fills: Sequence[Sequence[str]], left: float) -> Iterator[tuple[str, str]]:
    """One path per fill, of all its cells; cells side by side are one rectangle."""
    paths: dict[str, list[str]] = {}
    size = SIDE / len(fills)
    for index, row in enumerate(fills):
        start = 0
        for fill, cells in groupby(row):
            width = len(list(cells))
            corner = f"M{left + start * size:.1f} {26 + index * size:.1f}"
            paths.setdefault(fill, []).append(f"{corner}h{width * size:.1f}v{size:.1f}h{-width * size:.1f}z")
            start += width
    return ((" ".join(path), fill) for fill, path in paths.items())
