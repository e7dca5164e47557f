"""One process, or one of several that ``torchrun`` started: who am I, and what do we have in all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Processes:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1

    @property
    def writes(self) -> bool:
        """Whether this is the process that writes files and shows progress."""
        return self.rank == 0

    @property
    def shard(self) -> slice:
        """This process's part of a batch."""
        return slice(self.rank, None, self.size)

    def sum(self, value: Tensor) -> Tensor:
        """``value`` summed over all processes."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def agree(self, value: object) -> object:
        """The first process's ``value``, on all of them."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


@contextmanager
def joined() -> Iterator[Processes]:
    """The processes of this run, joined over gloo if ``torchrun`` started more than one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Processes()
        return
    dist.init_process_group("gloo")
    try:
        yield Processes(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()


def use_threads(threads: int | None) -> None:
    """Pin torch to ``threads``; None leaves its choice."""
    if threads is not None:
        torch.set_num_threads(threads)
