"""One process, or one of several that ``torchrun`` started, and the number of threads of each.

``comet_moe.parallel`` is imported by several processes only: it takes half a second.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from comet_moe.exceptions import MainProcessError, RecipeError, RunError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among those of the run; the one of rank 0 is the main process.

    Attributes:
        rank: of this process.
        size: number of processes.
        mesh: all processes, by replica ("dp") and by share of the experts ("ep"); None where each process
            has all experts.
    """

    rank: int = 0
    size: int = 1
    mesh: "DeviceMesh | None" = None

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

    def with_model(self, action: Callable[[], T]) -> T:
        """The value of ``action`` on the main process, on all.

        It runs the model: on the main process alone, or on all where each has only some of the experts.
        """
        if self.mesh is None:
            return self.on_main(action)
        value = action()
        return self.on_main(lambda: value)  # those of the others may differ by rounding

    def broadcast(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the main process, on all; they travel as tensors, one after the other."""
        if self.size == 1:
            return tensors
        layout = self.on_main(lambda: {name: (value.shape, value.dtype) for name, value in tensors.items()})
        received = {
            name: tensors[name] if self.is_main else torch.empty(shape, dtype=dtype)
            for name, (shape, dtype) in layout.items()
        }
        for value in received.values():
            dist.broadcast(value, src=0)
        return received

    def gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """``tensors`` with DTensors converted to full tensors; call it on all processes."""
        if self.mesh is None:
            return tensors
        from comet_moe.parallel import full_tensors

        return full_tensors(tensors)

    def spread_experts(self, model: nn.Module, ranks: int) -> "Processes":
        """Spread the experts of ``model``, in place, over ``ranks`` processes; returns these processes.

        With more processes there are several replicas of the experts.
        """
        if ranks == 1:
            return self
        self.on_main(lambda: _check_divides(ranks, self.size))
        from torch.distributed.device_mesh import init_device_mesh

        from comet_moe.parallel import expert_parallel

        mesh = init_device_mesh(_device(model), (self.size // ranks, ranks), mesh_dim_names=("dp", "ep"))
        expert_parallel(model, mesh["ep"])
        return replace(self, mesh=mesh)

    def data_parallel(self, module: nn.Module) -> nn.Module:
        """``module`` with its gradients averaged over all processes in each backward pass."""
        if self.size == 1:
            return module
        from torch.distributed.device_mesh import init_device_mesh

        from comet_moe.parallel import data_parallel

        mesh = self.mesh or init_device_mesh(_device(module), (self.size,), mesh_dim_names=("dp",))
        return data_parallel(module, mesh)

    def require_same(self, facts: Mapping[str, object], advice: str) -> None:
        """Refuse processes whose ``facts``, by name, are not those of the main process, with ``advice``."""
        if self.size == 1:
            return
        of_all: list[Any] = [None] * self.size
        dist.all_gather_object(of_all, dict(facts))
        self.on_main(lambda: _check_same(of_all, advice))


def _device(module: nn.Module) -> str:
    return next(module.parameters()).device.type


def _check_divides(ranks: int, size: int) -> None:
    if size % ranks:
        raise RecipeError(
            f"parallel.experts must divide the number of processes, {size}, got {ranks}: start with torchrun "
            f"--nproc-per-node {ranks}, or set parallel.experts=1"
        )


def _check_same(of_all: list[dict[str, object]], advice: str) -> None:
    for rank, facts in enumerate(of_all):
        for name in sorted(facts.keys() | of_all[0].keys()):
            wanted, given = (values.get(name, "not set") for values in (of_all[0], facts))
            if given != wanted:
                raise RunError(f"{name} is {given} on rank {rank} and {wanted} on rank 0: {advice}")


def count_restarts() -> int:
    """How often ``torchrun --max-restarts`` has started the processes again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _rendezvous() -> tuple[Any, int, int]:
    """The store that all processes share, the rank of this one, and their number."""
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return None, 0, 1
        store, rank, size = next(rendezvous("env://"))
        # The store outlives a restart by torchrun: what ranks of before have written there must not be read.
        return PrefixStore(f"comet_moe/{count_restarts()}", store), rank, size
    except ValueError as error:
        raise RunError(
            f"the variables of torchrun are not complete ({error}): start with torchrun, or unset WORLD_SIZE"
        ) from error


@contextmanager
def join_processes() -> Iterator[Processes]:
    """The processes of this run, connected if ``torchrun`` started more than one.

    Tensors on the CPU travel over gloo, those on CUDA devices over NCCL.
    """
    store, rank, size = _rendezvous()
    if size == 1:
        yield Processes()
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        yield Processes(rank, size)
    except RuntimeError as error:
        if not _is_lost_connection(error):
            raise
        raise RunError(
            f"rank {rank} of {size} lost its connection to another rank, which torchrun names: "
            f"start again with --resume, or let torchrun do it with --max-restarts"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _is_lost_connection(error: RuntimeError) -> bool:
    """Whether a collective failed; gloo raises a plain RuntimeError that names its source file."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


@contextmanager
def num_threads(threads: int | None) -> Iterator[None]:
    """Let torch use ``threads`` threads inside the block; None leaves the number as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
