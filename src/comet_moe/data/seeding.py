"""Named random streams: each random choice has its own, so that adding one does not change another."""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the generator of the choice called ``name`` under ``seed`` (a non-negative integer)."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])
