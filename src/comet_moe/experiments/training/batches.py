"""Data of a run: the data set that a configuration names, and batches of its rows as tensors.

Batches are slices of arrays that stay where they are, in memory or mapped from disk; only the rows of a batch
are copied.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comet_moe.exceptions import RecipeError
from comet_moe.experiments.config import TrainConfig
from comet_moe.experiments.config.schema import rows_per_step
from comet_moe.experiments.data import DATASETS, RESERVED_OPTIONS, Dataset, Split, default_cache, load

T = TypeVar("T")


class Batch(NamedTuple):
    """Rows of a split as tensors, (B, ...) each."""

    features: dict[str, Tensor]
    targets: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.features.values())))


def training_batches(
    split: Split, batch_size: int | None, seed: int, epoch: int, shard: slice = slice(None)
) -> Iterator[Batch]:
    """All rows of ``split`` once, in an order that depends on ``seed`` and ``epoch`` alone.

    Args:
        split: rows to train on.
        batch_size: rows of a batch over all processes; None for :func:`rows_per_step`.
        seed, epoch: what the order depends on.
        shard: the rows of each batch that belong to this process.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(split))
    step = rows_per_step(len(split), batch_size)
    for start in range(0, len(order), step):
        yield take_rows(split, order[start : start + step][shard])


def prefetched(batches: Iterable[T], ahead: int = 2) -> Iterator[T]:
    """``batches`` in their order, each made in another thread while the one before it is in use.

    At most ``ahead`` batches wait. An error in ``batches`` is raised here.
    """
    queue: Queue[T | BaseException | None] = Queue(ahead)
    is_closed = Event()

    def put(entry: T | BaseException | None) -> bool:
        while not is_closed.is_set():
            with suppress(Full):
                queue.put(entry, timeout=0.1)
                return True
        return False

    def produce() -> None:
        try:
            for batch in batches:
                if not put(batch):
                    return
            put(None)
        except BaseException as error:  # raised again by the consumer
            put(error)

    thread = Thread(target=produce, name="comet-moe-batches", daemon=True)
    thread.start()
    try:
        while (entry := queue.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            yield entry
    finally:
        is_closed.set()
        thread.join()


def evaluation_batches(split: Split, batch_size: int) -> Iterator[Batch]:
    """All rows of ``split`` in their own order."""
    for start in range(0, len(split), batch_size):
        yield take_rows(split, slice(start, start + batch_size))


def take_rows(split: Split, rows: npt.NDArray[np.int64] | slice) -> Batch:
    """Copy ``rows`` of ``split``."""
    return Batch(
        {name: _copy(array[rows]) for name, array in split.features.items()},
        {name: _copy(array[rows]) for name, array in split.targets.items()},
    )


def _copy(array: npt.NDArray[Any]) -> Tensor:
    tensor = torch.from_numpy(np.array(array))
    # Into memory that torch aligns: products of matrices at other addresses round differently.
    return tensor.clone() if tensor.is_floating_point() else tensor


def load_dataset(config: TrainConfig) -> Dataset:
    """The data set of ``config``: from the cache, or prepared from ``data.path``; never from the network."""
    data = config.data
    if data.path is None and data.name in DATASETS and DATASETS[data.name].is_user_supplied:
        raise RecipeError(f"recipe {config.recipe} needs data.path, a table of yours: --set data.path=my.csv")
    reserved = sorted(RESERVED_OPTIONS & data.options.keys())
    if reserved:
        raise RecipeError(f"there is no setting data.options.{reserved[0]}: no data set has such an option")
    return load(
        data.name,
        cache=default_cache(),
        seed=data.seed,
        split=data.split,
        source=None if data.path is None else Path(data.path),
        strict=not data.any_size,
        **data.options,
    )
