"""Data parallelism, clipped gradients and whole weights of models whose experts are sharded over ranks."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from comet_moe import checks
from comet_moe.local_search import Permutation
from comet_moe.parallel.experts import join_ranks


def data_parallel(module: nn.Module, mesh: DeviceMesh, **options: Any) -> DistributedDataParallel:
    """``DistributedDataParallel`` over all ranks, for models with mixtures of this library.

    It averages gradients as ``DistributedDataParallel`` does. It also averages

    * the gradients of experts that :func:`~comet_moe.parallel.expert_parallel` has sharded over one dimension
      of ``mesh``, over the other dimension;
    * the gradient of a local search while the search is active.

    After the search its parameter U has no gradient. ``DistributedDataParallel`` alone then needs
    ``find_unused_parameters``, which costs a pass over the graph in each step. Here ``static_graph=True``
    works too.

    Auxiliary losses are those of the whole batch, on every rank. Buffers are not broadcast, since gates count
    the rows of their own rank in them.

    Args:
        module: the model, the same on each rank.
        mesh: all ranks, with one or two dimensions.
        options: options of ``DistributedDataParallel``.
    """
    checks.require_type("mesh", mesh, DeviceMesh)
    if mesh.ndim > 2 or mesh.size() != dist.get_world_size():
        raise ValueError(
            f"mesh must have 1 or 2 dimensions with all {dist.get_world_size()} ranks, got shape "
            f"{tuple(mesh.shape)}"
        )
    join_ranks(module)
    experts = {name: weight for name, weight in module.named_parameters() if isinstance(weight, DTensor)}
    searches = {
        name: parameter
        for name, parameter in module.named_parameters()
        if any(parameter is part.logits for part in module.modules() if isinstance(part, Permutation))
    }
    # The documented way to leave parameters out, despite its underscore: DDP's constructor reads it.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [*experts, *searches])
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers; torch 2.8 does not have the new name.
        warnings.simplefilter("ignore", FutureWarning)
        parallel = DistributedDataParallel(module, **{"broadcast_buffers": False, **options})
    if searches:
        group = dist.new_group()  # a separate group, since its order among DDP's collectives may vary
        for logits in searches.values():
            _average_gradient(parallel, logits, group)
    for weight in experts.values():
        own = weight.device_mesh.mesh_dim_names or ()
        others = [name for name in mesh.mesh_dim_names or () if name not in own]
        if others:
            _average_gradient(parallel, weight, mesh.get_group(others[0]))
    return parallel


def _average_gradient(
    parallel: DistributedDataParallel, parameter: nn.Parameter | DTensor, group: Any
) -> None:
    """Average ``parameter`` now, and its gradient after each backward pass that synchronises."""
    size = dist.get_world_size(group)

    def average(accumulated: Any) -> None:
        if parallel.require_backward_grad_sync:
            gradient = _local(accumulated.grad)
            dist.all_reduce(gradient, group=group)
            gradient.div_(size)

    dist.broadcast(_local(parameter).detach(), dist.get_global_rank(group, 0), group=group)
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(average)


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    r"""Like ``torch.nn.utils.clip_grad_norm_``, also for models with expert parallelism.

    .. math:: g \leftarrow g \cdot \min(1, \frac{\mathrm{max\_norm}}{\|g\| + 10^{-6}})

    The function of torch takes either tensors or ``DTensor`` of one mesh. Returns the norm of all gradients.
    """
    checks.not_negative("max_norm", max_norm)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        by_mesh.setdefault(mesh, []).append(gradient)
    norms = []
    for group in by_mesh.values():
        norm = get_total_norm(group, norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.zeros(())
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = _local(gradient)
        local.mul_(factor.to(local.device))
    return total


def full_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` with every ``DTensor`` as a full tensor, on every rank; call it on all ranks.

    It saves a model with expert parallelism like a model without it:
    ``save_file(full_tensors(model.state_dict()), path)``.
    """
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors.items()
    }


def shard_like(tensor: Tensor, other: Tensor) -> Tensor:
    """``tensor``, the same on all ranks, sharded over ranks like ``other``; call it on all ranks."""
    if not isinstance(other, DTensor) or isinstance(tensor, DTensor) or tensor.shape != other.shape:
        return tensor
    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
