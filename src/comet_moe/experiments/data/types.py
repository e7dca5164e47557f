"""The types of a data set: the request, what a builder returns, and what training reads.

A builder takes the raw files and a ``Request`` and returns a ``RawDataset``; the cache writes that to disk
and opens it as a ``Dataset``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.splits import make_rng
from comet_moe.experiments.data.vocabulary import Vocabulary
from comet_moe.files import inside

Array = npt.NDArray[Any]

MAX_ROWS = 10**8
"""Rows that can be asked for of a data set whose rows are drawn."""


@dataclass(frozen=True)
class Request:
    """The request for a data set.

    Attributes:
        seed: every random choice derives from it.
        split: the name of the way to split the rows, such as "random".
        strict: whether a file must have as many rows or images as its publisher states.
        options: the value of every option of the data set.
    """

    seed: int
    split: str
    strict: bool
    options: Mapping[str, Any]

    def make_rng(self, name: str) -> np.random.Generator:
        """Return the generator of the random choice called ``name``."""
        return make_rng(self.seed, name)

    def get_positive_int(self, option: str) -> int:
        """Return an option that must be an integer of at least 1."""
        value = self.options[option]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_ROWS:
            raise DataError(f"option {option} is {value!r}; give an integer in 1..{MAX_ROWS:,}.")
        return value


@dataclass(frozen=True)
class BlockwiseArray:
    """An array that is made block by block along its first axis, because it may not fit in memory."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    make_blocks: Callable[[], Iterator[Array]]


@dataclass(frozen=True)
class RawSplit:
    """The arrays of one split before they are written."""

    features: Mapping[str, Array | BlockwiseArray]
    targets: Mapping[str, Array]


@dataclass(frozen=True)
class RawDataset:
    """A data set before it is written; its metadata ``meta`` is plain JSON."""

    train: RawSplit
    validation: RawSplit
    test: RawSplit
    meta: dict[str, Any]
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamedDataset:
    """A data set whose splits are written side by side, block by block, because they may not fit in memory.

    Attributes:
        rows: number of rows of each split.
        features, targets: the shape of one row and the type of each array.
        make_blocks: iterates over blocks of rows: the split, its features and its targets.
        meta: metadata, plain JSON.
    """

    rows: Mapping[str, int]
    features: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    targets: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    make_blocks: Callable[[], Iterator[tuple[str, Mapping[str, Array], Mapping[str, Array]]]]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Split:
    """One split of a data set: read-only arrays of equal length, memory-mapped if they come from a cache.

    Recommender sets: features ``user`` and ``item`` int32 (N,), targets ``watched`` uint8 (N,) and ``rating``
    float32 (N,), 0 where not watched. Image sets: feature ``image`` uint8 (N, C, H, W), one (N,) target per
    task. Tables: see :mod:`comet_moe.experiments.data.table.encode`.
    """

    features: dict[str, Array]
    targets: dict[str, Array]

    def __len__(self) -> int:
        return len(next(iter(self.features.values())))


@dataclass(frozen=True)
class Dataset:
    """A prepared data set; its metadata ``meta`` is plain JSON: sizes, sources, and how it was made."""

    name: str
    train: Split
    validation: Split
    test: Split
    meta: dict[str, Any]
    folder: Path | None = None

    def vocabulary(self, feature: str) -> Vocabulary:
        """Return the ids behind the numbers of ``feature`` ("user" or "item"), to encode new rows with."""
        files = self.meta.get("vocabularies", {})
        if self.folder is None or feature not in files:
            names = ", ".join(files) or "none"
            raise DataError(f"{self.name} has no vocabulary of {feature!r}; its vocabularies are: {names}.")
        return Vocabulary.load(inside(self.folder, files[feature]))
