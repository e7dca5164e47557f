"""Tensors as arrays for compiled loops, and the backward passes of their autograd functions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed


def as_array(tensor: Tensor) -> Any:
    """``tensor`` as a contiguous numpy array: a view of its memory where that holds the values in order.

    ``force`` detaches, and resolves a lazy negation.
    """
    return (tensor if tensor.is_contiguous() else tensor.contiguous()).numpy(force=True)


def parameters_as_arrays(*tensors: Tensor) -> list[Any]:
    """As :func:`as_array`, for parameters or their gradients.

    ``Tensor.numpy`` marks memory as fixed for good. In a process group parameters go another way, which takes
    a few microseconds more, since ``fully_shard`` frees their memory between two uses.
    """
    in_group = distributed.is_available() and distributed.is_initialized()
    return [_memory_of(tensor) if in_group and tensor.numel() else as_array(tensor) for tensor in tensors]


def _memory_of(tensor: Tensor) -> Any:
    """As :func:`as_array`; memory stays resizable. Before numpy 2.3 ``np.from_dlpack`` is read-only."""
    return np.asarray(_Memory(tensor.detach().resolve_neg().contiguous()))


class _Memory:
    """The memory of a contiguous tensor that is not empty, as ``np.asarray`` reads it: floats, or uint16."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor  # alive as long as the array
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": f"={'f' if tensor.is_floating_point() else 'u'}{tensor.itemsize}",
            "data": (tensor.data_ptr(), False),
        }


def differentiable_backward(
    definition: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The backward pass of ``definition`` as a graph that can be differentiated once more.

    For the ``backward`` of an autograd function whose forward is compiled. There gradients are enabled only
    if the caller asked for ``create_graph=True``. A compiled backward pass would leave the graph without the
    dependence on ``inputs``, and second derivatives would be silently wrong. ``once_differentiable`` notices
    only gradients that require one themselves.

    Args:
        definition: the torch version, ``definition(*inputs)``.
        inputs: what autograd saved, with its history.
        grads: gradients of the outputs, None for those that were not used.
        needs_grad: which inputs need a gradient.

    Returns:
        One gradient for each input, None where it is not needed.
    """
    outputs = definition(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    used = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    wanted = [tensor for tensor, needed in zip(inputs, needs_grad, strict=True) if needed]
    gradients = iter(
        torch.autograd.grad(
            [out for out, _ in used],
            wanted,
            [grad for _, grad in used],
            create_graph=True,
            allow_unused=True,
        )
    )
    return tuple(next(gradients) if needed else None for needed in needs_grad)
