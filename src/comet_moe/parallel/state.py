"""Tensors that are spread over ranks as whole ones, and whole ones as such that are spread."""

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def full_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` with every ``DTensor`` as a whole tensor, on every rank; call it on all ranks.

    So a model with expert parallelism is saved as one without:
    ``save_file(full_tensors(model.state_dict()), path)``.
    """
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors.items()
    }


def shard_like(tensor: Tensor, other: Tensor) -> Tensor:
    """``tensor``, the same on all ranks, spread over ranks as ``other`` is; call it on all ranks."""
    if not isinstance(other, DTensor) or isinstance(tensor, DTensor) or tensor.shape != other.shape:
        return tensor
    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)
