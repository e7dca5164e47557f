"""Seeded splits of N rows into train, validation and test.

Named random streams: each random choice has its own, so that adding one does not change another.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from comet_moe.exceptions import DataError

Index = npt.NDArray[np.int64]
Sizes = tuple[int, int, int]
SPLITS = ("train", "validation", "test")


def movielens_sizes(rows: int) -> Sizes:
    """MovieLens: a tenth (rounded up) for test, then an eighth of the rest (rounded up) for validation."""
    test = rows - 9 * rows // 10
    validation = -(-(rows - test) // 8)
    return rows - test - validation, validation, test


def percent_sizes(rows: int, train_percent: int) -> Sizes:
    """``train_percent`` % (rounded down) for train, the rest in halves, test the larger one if it is odd."""
    train = train_percent * rows // 100
    validation = (rows - train) // 2
    return train, validation, rows - train - validation


def random_split(sizes: Sizes, rng: np.random.Generator) -> tuple[Index, Index, Index]:
    """Deal the rows 0..sum(sizes)-1 at random into parts of the given sizes, each in random order."""
    _refuse_empty(sizes)
    train, validation, test = np.split(rng.permutation(sum(sizes)), np.cumsum(sizes)[:2])
    return train, validation, test


def stratified_split(
    flag: npt.NDArray[np.bool_], sizes: Sizes, rng: np.random.Generator
) -> tuple[Index, Index, Index]:
    """Deal rows at random so that every part has its share of flagged rows, to within one row.

    Parts have exactly the given sizes, are disjoint, cover all rows and are each in random order.
    """
    _refuse_empty(sizes)
    flagged = _shares(int(flag.sum()), sizes)
    order = rng.permutation(len(flag))
    flag_in_order = flag[order]
    part = np.empty(len(flag), dtype=np.int8)
    part[flag_in_order] = np.repeat(np.arange(3, dtype=np.int8), flagged)
    part[~flag_in_order] = np.repeat(np.arange(3, dtype=np.int8), np.subtract(sizes, flagged))
    return order[part == 0], order[part == 1], order[part == 2]


def _shares(total: int, sizes: Sizes) -> list[int]:
    """Round total * size / sum(sizes) down or up so that the shares sum to total (largest remainders up)."""
    rows = sum(sizes)
    shares = [total * size // rows for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda part: -(total * sizes[part] % rows))
    for part in by_remainder[: total - sum(shares)]:
        shares[part] += 1
    return shares


def _refuse_empty(sizes: Sizes) -> None:
    if min(sizes) < 1:
        parts = ", ".join(f"{size} {name}" for size, name in zip(sizes, SPLITS, strict=True))
        raise DataError(
            f"{sum(sizes)} rows split into {parts} rows; give more rows, so that no part is empty."
        )


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the generator of the choice called ``name`` under ``seed`` (a non-negative integer)."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])
