"""Data parallelism for models whose experts may be sharded over ranks."""

import warnings
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

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
        others = [name for name in mesh.mesh_dim_names or () if name not in _names(weight)]
        if others:
            _average_gradient(parallel, weight, mesh.get_group(others[0]))
    return parallel


def _names(weight: DTensor) -> tuple[str, ...]:
    return weight.device_mesh.mesh_dim_names or ()


def _average_gradient(
    parallel: DistributedDataParallel, parameter: nn.Parameter | DTensor, group: Any
) -> None:
    """Average ``parameter`` now, and its gradient after each backward pass that synchronises."""
    size = dist.get_world_size(group)

    def local(tensor: Any) -> Any:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def average(accumulated: Any) -> None:
        if parallel.require_backward_grad_sync:
            gradient = local(accumulated.grad)
            dist.all_reduce(gradient, group=group)
            gradient.div_(size)

    dist.broadcast(local(parameter).detach(), dist.get_global_rank(group, 0), group=group)
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(average)
