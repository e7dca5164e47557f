"""What a family is asked for and what it hands to the cache: arrays, or blocks where they exceed memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from comet_moe.data.dataset import Array
from comet_moe.data.errors import DataError
from comet_moe.data.seeding import stream
from comet_moe.data.vocabulary import Vocabulary


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
class DraftSplit:
    """The arrays of one split before they are written."""

    features: Mapping[str, Array | Blocks]
    targets: Mapping[str, Array]


@dataclass(frozen=True)
class Draft:
    """A data set before it is written; ``meta`` is plain JSON."""

    train: DraftSplit
    validation: DraftSplit
    test: DraftSplit
    meta: dict[str, Any]
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)
