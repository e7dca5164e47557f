"""Batches as slices of arrays that stay where they are: in memory, or mapped from disk.

The data of a run, from its configuration.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comet_moe.config import TrainConfig
from comet_moe.data import DATASETS, Dataset, Split, default_cache, load
from comet_moe.exceptions import RecipeError


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


def load_dataset(config: TrainConfig) -> Dataset:
    """The data set of ``config``: from the cache, or prepared from ``data.path``; never from the network."""
    data = config.data
    if data.path is None and data.name in DATASETS and DATASETS[data.name].is_user_supplied:
        raise RecipeError(f"recipe {config.recipe} needs data.path, a table of yours: --set data.path=my.csv")
    _refuse_what_load_names(data.options)
    return load(
        data.name,
        cache=default_cache(),
        seed=data.seed,
        split=data.split,
        source=None if data.path is None else Path(data.path),
        strict=not data.any_size,
        **data.options,
    )


def _refuse_what_load_names(options: dict[str, object]) -> None:
    wrong = sorted({"name", "cache", "seed", "split", "source", "strict"} & options.keys())
    if wrong:
        raise RecipeError(f"there is no setting data.options.{wrong[0]}: no data set has such an option")
