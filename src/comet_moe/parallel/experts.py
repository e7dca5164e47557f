"""Expert parallelism: each rank has some of the experts, and rows travel to them and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from comet_moe import checks
from comet_moe.experts.base import Experts, Slots, WeightedPairs, check_output
from comet_moe.experts.neurons import NeuronExperts
from comet_moe.gates import CometGate, Gate
from comet_moe.gates.ranks import Ranks
from comet_moe.mixture.moe import MultiGateMoE
from comet_moe.parallel.exchange import Exchange, Traffic

ModuleType = TypeVar("ModuleType", bound=nn.Module)


def expert_parallel(
    module: ModuleType, mesh: DeviceMesh, batch_group: dist.ProcessGroup | None = None
) -> ModuleType:
    """Shard the experts of every mixture in ``module`` over the ranks of ``mesh``, in place.

    Every parameter (n, ...) of a stack becomes a ``DTensor`` with placement ``Shard(0)`` and keeps its name.
    Each rank routes its own rows. ``all_to_all_single`` sends each (row, expert) pair to the rank of the
    expert and its output back to the rank of the row. A pair costs p numbers on the way there and u on the
    way back. A pair that several gates select travels once. Local search renumbers experts and moves no
    weights.

    Gradients are means over the ranks, as in ``DistributedDataParallel``. If the mean of the ranks' losses is
    the loss of the whole batch, every gradient is the gradient of the whole batch. Auxiliary losses are those
    of the whole batch on every rank. Parameters outside the stacks are unchanged; for their gradients see
    :func:`~comet_moe.parallel.data_parallel`.

    All ranks must run the same number of forward and backward passes of the mixtures. A rank may have any
    number of rows, including none.

    Args:
        module: a mixture or a model with mixtures, the same on each rank of ``mesh``. The weights of the
            first rank are used.
        mesh: a one-dimensional mesh, such as ``mesh["ep"]``.
        batch_group: the ranks whose rows form one batch; None for all ranks.

    Returns:
        ``module``.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from comet_moe import MoE
        >>> from comet_moe.experts import DenseExperts
        >>> from comet_moe.gates import TopKGate
        >>> from comet_moe.parallel import expert_parallel
        >>> def build():  # in a process that torchrun has started
        ...     mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        ...     moe = MoE(experts=DenseExperts(64, 32, 64), gate=TopKGate(32, 64, k=2))
        ...     return expert_parallel(moe, mesh["ep"])
    """
    checks.require_type("mesh", mesh, DeviceMesh)
    if mesh.ndim != 1:
        raise ValueError(f'mesh must have 1 dimension, such as mesh["ep"], got {mesh.ndim}')
    stacks = [stack for stack in module.modules() if isinstance(stack, Experts)]
    if not stacks:
        raise ValueError(f"{type(module).__name__} has no experts to shard over ranks")
    for stack in stacks:
        _check_stack(stack)
    _require_dense_gradients(module)
    for stack in stacks:
        _shard(stack, mesh)
    join_ranks(module, batch_group)
    return module


def join_ranks(module: nn.Module, batch_group: dist.ProcessGroup | None = None) -> None:
    """Compute the auxiliary losses in ``module`` over the rows of several ranks, on each of them.

    :func:`expert_parallel` and :func:`~comet_moe.parallel.data_parallel` call it. Call it yourself only for
    models in ``fully_shard`` or ``DistributedDataParallel`` without them.

    Args:
        module: a model with gates.
        batch_group: the ranks whose rows form one batch; None for all ranks.
    """
    _require_dense_gradients(module)
    ranks = Ranks(batch_group)
    for part in module.modules():
        if isinstance(part, Gate | MultiGateMoE):
            part.ranks = ranks


def _require_dense_gradients(module: nn.Module) -> None:
    for part in module.modules():
        stack, gate = isinstance(part, NeuronExperts), isinstance(part, CometGate)
        if (stack and part.row_sparse) or (gate and part.sparse):
            raise ValueError(
                f"only dense gradients are summed over ranks: build {type(part).__name__} with sparse=False"
            )


def _check_stack(stack: Experts) -> None:
    if isinstance(stack, ExpertParallel):
        raise ValueError(f"the experts of {type(stack).__name__} are sharded over ranks already")
    n = stack.num_experts
    for name, parameter in stack.named_parameters():
        if parameter.dim() == 0 or len(parameter) != n:
            raise ValueError(
                f"expert_parallel needs stacked weights ({n}, ...), but {name} of {type(stack).__name__} has "
                f"shape {tuple(parameter.shape)}: use a stack such as DenseExperts, or subclass Experts"
            )


def _shard(stack: Experts, mesh: DeviceMesh) -> None:
    for part in stack.modules():
        for name, parameter in part.named_parameters(recurse=False):
            sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            setattr(part, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
    kind = type(stack)
    # As in fully_shard: isinstance checks and the names of parameters still work.
    stack.__class__ = type(f"Parallel{kind.__name__}", (ExpertParallel, kind), {"__doc__": kind.__doc__})
    parallel = cast(ExpertParallel, stack)
    parallel.exchange = Exchange(mesh, stack.num_experts)


class ExpertParallel(Experts):
    """Mixin of a stack whose experts are sharded over ranks.

    Attributes:
        exchange: the ranks, and how rows travel between them.
    """

    only_pairs = True
    exchange: Exchange

    @property
    def traffic(self) -> Traffic:
        """The bytes and pairs that this rank has sent."""
        return self.exchange.traffic

    def forward(
        self, rows: Tensor, counts: list[int] | Tensor | WeightedPairs | Slots | None = None
    ) -> Tensor:
        """Each expert, on any rank, on its own rows: (M, *input) -> (M, *output).

        Args:
            rows: (M, *input), those of expert 0 first, then those of expert 1, and so on.
            counts: (n,) number of rows of each expert.
        """
        if not isinstance(counts, list):
            raise ValueError("experts that are sharded over ranks run (sample, expert) pairs only")
        device = rows.device.type
        if rows.dtype == torch.float32 and torch.is_autocast_enabled(device):
            rows = rows.to(torch.get_autocast_dtype(device))  # as the first product would: half the bytes
        row_counts = self.exchange.exchange_counts(counts, rows.device)
        arrived = row_counts.send(rows.flatten(1)).unflatten(1, rows.shape[1:])
        with _local_weights(self, self.exchange.size):
            outputs = self.sparse(arrived, row_counts.counts or [0])
        check_output(outputs, (arrived.shape[0],), f"{type(self).__name__}.sparse", arrived)
        returned = row_counts.send_back(outputs.flatten(1))
        return returned if outputs.dim() == 2 else returned.unflatten(1, outputs.shape[1:])


@contextmanager
def _local_weights(stack: nn.Module, size: int) -> Iterator[None]:
    """Within the block, the parameters of ``stack`` are those of this rank's experts, as plain tensors.

    The gradient of a weight is a sum over the losses of all ranks; it is divided by their number. A rank
    without experts gets one expert of zeros. No row uses it; it gives the outputs their shape.
    """
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for part in stack.modules():
            for name, parameter in part._parameters.items():
                if isinstance(parameter, DTensor):
                    replaced.append((part, name, parameter))
                    local = _DivideGradient.apply(parameter.to_local(), size)
                    if not len(local):
                        local = torch.cat((local, local.new_zeros(1, *local.shape[1:])))
                    part._parameters[name] = local
        yield
    finally:
        for part, name, parameter in replaced:
            part._parameters[name] = parameter


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.divisor, None
