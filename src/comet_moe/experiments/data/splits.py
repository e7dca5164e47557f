"""Seeded random choices, and splits of N rows into train, validation and test."""

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from comet_moe.exceptions import DataError

Index = npt.NDArray[np.int64]  # row numbers
Sizes = tuple[int, int, int]  # numbers of train, validation and test rows
SPLITS = ("train", "validation", "test")


def make_rng(seed: int, name: str) -> np.random.Generator:
    """Return the generator of the random choice called ``name`` under ``seed``, an integer of at least 0.

    Each choice has its own generator, so that adding one does not change the others.
    """
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def percent_sizes(rows: int, train_percent: int) -> Sizes:
    """Return ``train_percent`` % (rounded down) for train and half of the rest each for the others.

    If the rest is odd, test has one row more than validation.
    """
    train = train_percent * rows // 100
    validation = (rows - train) // 2
    return train, validation, rows - train - validation


def random_split(sizes: Sizes, rng: np.random.Generator) -> tuple[Index, Index, Index]:
    """Split the rows 0..sum(sizes)-1 at random into the given sizes, each split in random order."""
    _require_nonempty(sizes)
    train, validation, test = np.split(rng.permutation(sum(sizes)), np.cumsum(sizes)[:2])
    return train, validation, test


def stratified_split(
    flag: npt.NDArray[np.bool_], sizes: Sizes, rng: np.random.Generator
) -> tuple[Index, Index, Index]:
    """Split the rows of ``flag`` (N,) at random so that every split has its share of flagged rows.

    The share is exact to within one row. The splits have exactly the given sizes, are disjoint, cover all
    rows and are each in random order.
    """
    _require_nonempty(sizes)
    flagged = share_sizes(int(flag.sum()), sizes)
    order = rng.permutation(len(flag))
    flag_in_order = flag[order]
    split = np.empty(len(flag), dtype=np.int8)
    split[flag_in_order] = np.repeat(np.arange(3, dtype=np.int8), flagged)
    split[~flag_in_order] = np.repeat(np.arange(3, dtype=np.int8), np.subtract(sizes, flagged))
    return order[split == 0], order[split == 1], order[split == 2]


def share_sizes(rows: int, shares: Sequence[float]) -> list[int]:
    """Rows of each split: shares of ``rows``, rounded so that they sum to it (largest remainders up)."""
    exact = np.asarray(shares, dtype=np.float64) / sum(shares) * rows
    sizes = np.floor(exact + 1e-9).astype(int)
    order = np.argsort(-(exact - sizes), kind="stable")
    sizes[order[: rows - sizes.sum()]] += 1
    return [int(size) for size in sizes]


def _require_nonempty(sizes: Sizes) -> None:
    if min(sizes) < 1:
        counts = ", ".join(f"{size} {name}" for size, name in zip(sizes, SPLITS, strict=True))
        raise DataError(
            f"{sum(sizes)} rows split into {counts} rows; give more rows, so that no split is empty."
        )
