"""Converts DTensors to full tensors, and full tensors to DTensors."""

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


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
