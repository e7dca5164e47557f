"""What every data set looks like once it is prepared: three splits of plain arrays and a description."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from comet_moe.data.errors import DataError
from comet_moe.data.vocabulary import Vocabulary

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
