"""Batches as slices of arrays that stay where they are: in memory, or mapped from disk."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comet_moe.data import Split


class Batch(NamedTuple):
    """Rows of a split as tensors."""

    features: dict[str, Tensor]
    targets: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.features.values())))


def shuffled(rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The order of the rows in ``epoch``, a function of its arguments alone."""
    return np.random.default_rng([seed, epoch]).permutation(rows)


def batches(split: Split, order: npt.NDArray[np.int64], batch_size: int, shard: slice) -> Iterator[Batch]:
    """The rows of ``split`` in ``order``, ``batch_size`` at a time, of each batch the part in ``shard``."""
    for start in range(0, len(order), batch_size):
        yield take(split, order[start : start + batch_size][shard])


def slices(split: Split, batch_size: int) -> Iterator[Batch]:
    """The rows of ``split`` as they stand."""
    for start in range(0, len(split), batch_size):
        yield take(split, slice(start, start + batch_size))


def take(split: Split, rows: npt.NDArray[np.int64] | slice) -> Batch:
    """Copy ``rows`` out of ``split``."""
    return Batch(
        {name: torch.from_numpy(np.array(array[rows])) for name, array in split.features.items()},
        {name: torch.from_numpy(np.array(array[rows])) for name, array in split.targets.items()},
    )
