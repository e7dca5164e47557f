"""One process, or one of several that ``torchrun`` started, and the number of threads of each."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from comet_moe.exceptions import MainProcessError, RunError

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among those of the run; the one of rank 0 is the main process."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and shows progress."""
        return self.rank == 0

    @property
    def shard(self) -> slice:
        """The rows of a batch that belong to this process."""
        return slice(self.rank, None, self.size)

    def sum(self, value: Tensor) -> Tensor:
        """``value`` summed over all processes."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def on_main(self, action: Callable[[], T]) -> T:
        """Run ``action`` on the main process only and return its value on all; if it fails, all stop."""
        if self.size == 1:
            return action()
        outcome: list[Any] = [None, False]
        failure = None
        if self.is_main:
            try:
                outcome = [action(), True]
            except BaseException as error:
                failure = error
        dist.broadcast_object_list(outcome, src=0)
        if failure is not None:
            raise failure
        if not outcome[1]:
            raise MainProcessError("the main process failed: see its message")
        value: T = outcome[0]
        return value

    def main_first(self, action: Callable[[], T]) -> T:
        """Run ``action`` on the main process, then on the others, which find what it has cached."""
        values: list[T] = []
        self.on_main(lambda: values.append(action()))
        return values[0] if values else action()

    def data_parallel(self, module: nn.Module, find_unused_parameters: bool) -> nn.Module:
        """``module`` with its gradients averaged over all processes in each backward pass."""
        if self.size == 1:
            return module
        with warnings.catch_warnings():
            # torch 2.13 has another name for broadcast_buffers, which torch 2.8 does not know.
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(
                module, broadcast_buffers=False, find_unused_parameters=find_unused_parameters
            )


@contextmanager
def join_processes() -> Iterator[Processes]:
    """The processes of this run, connected if ``torchrun`` started more than one.

    Tensors on the CPU travel over gloo, those on CUDA devices over NCCL.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise RunError(
            f"WORLD_SIZE must be a number of processes, got {text!r}: start with torchrun, or unset it"
        )
    size = int(text)
    if size == 1:
        yield Processes()
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield Processes(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()


@contextmanager
def num_threads(threads: int | None) -> Iterator[None]:
    """Let torch use ``threads`` threads inside the block; None leaves the number as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
