"""What every data set looks like once it is prepared: three splits of plain arrays and a description.

What a family is asked for and what it hands to the cache: arrays, or blocks where they exceed memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from comet_moe.data.splits import stream
from comet_moe.data.vocabulary import Vocabulary
from comet_moe.exceptions import DataError

__all__ = ["Array", "DataError", "Dataset", "Split"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Split:
    """One part of a data set: read-only arrays of equal length, memory-mapped where they come from a cache.

    Recommender sets: features ``user`` and ``item`` int32 (N,), targets ``watched`` uint8 (N,) and ``rating``
    float32 (N,), 0 where not watched. Vision sets: feature ``image`` uint8 (N, C, H, W), one (N,) target for
    each task.
    """

    features: dict[str, Array]
    targets: dict[str, Array]

    def __len__(self) -> int:
        return len(next(iter(self.features.values())))


@dataclass(frozen=True)
class Dataset:
    """A prepared data set; ``meta`` is plain JSON and says where it came from and how it was made."""

    name: str
    train: Split
    validation: Split
    test: Split
    meta: dict[str, Any]
    folder: Path | None = None

    def vocabulary(self, feature: str) -> Vocabulary:
        """Return the ids behind the numbers of ``feature`` ("user" or "item"), to encode new rows with."""
        known = self.meta.get("vocabularies", {})
        if self.folder is None or feature not in known:
            names = ", ".join(known) or "none"
            raise DataError(f"{self.name} has no vocabulary of {feature!r}; its vocabularies are: {names}.")
        return Vocabulary.load(self.folder / known[feature])


@dataclass(frozen=True)
class Request:
    """One data set as asked for: every random choice derives from ``seed`` through a named stream."""

    seed: int
    split: str
    strict: bool
    options: Mapping[str, Any]

    def stream(self, name: str) -> np.random.Generator:
        """Return the generator of the random choice called ``name``."""
        return stream(self.seed, name)

    def positive(self, option: str) -> int:
        """Return an option that must be a whole number of at least 1."""
        value = self.options[option]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DataError(f"option {option} is {value!r}; give a whole number of at least 1.")
        return value


@dataclass(frozen=True)
class Blocks:
    """An array that is made piece by piece along its first axis, for what does not fit in memory."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    make: Callable[[], Iterator[Array]]


@dataclass(frozen=True)
class RawSplit:
    """The arrays of one split before they are written."""

    features: Mapping[str, Array | Blocks]
    targets: Mapping[str, Array]


@dataclass(frozen=True)
class RawDataset:
    """A data set before it is written; ``meta`` is plain JSON."""

    train: RawSplit
    validation: RawSplit
    test: RawSplit
    meta: dict[str, Any]
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)
