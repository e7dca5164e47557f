"""One process, or one of several that ``torchrun`` started: who am I, and what do we have in all."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class OtherProcessFailed(Exception):
    """The first process failed and says why; the others only stop."""


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

    def first(self, action: Callable[[], T]) -> T:
        """What ``action`` gives on the first process, on all of them; if it fails there, all stop."""
        if self.size == 1:
            return action()
        box: list[Any] = [None, False]
        failure = None
        if self.writes:
            try:
                box = [action(), True]
            except BaseException as error:
                failure = error
        dist.broadcast_object_list(box, src=0)
        if failure is not None:
            raise failure
        if not box[1]:
            raise OtherProcessFailed
        value: T = box[0]
        return value

    def in_turn(self, action: Callable[[], T]) -> T:
        """Run ``action`` on the first process, then on the others, each with its own value."""
        done: list[T] = []
        self.first(lambda: done.append(action()))
        return done[0] if done else action()


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


@contextmanager
def num_threads(threads: int | None) -> Iterator[None]:
    """Let torch use ``threads`` inside the block; None leaves its choice."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
