"""How tensors get into compiled loops, and gradients out of them."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def as_array(tensor: Tensor) -> Any:
    """``tensor`` as a contiguous numpy array: a view of its memory where that holds the values in order.

    ``force`` detaches, and resolves lazy conjugation and negation.
    """
    return tensor.contiguous().numpy(force=True)


def first_order_only(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """Decorates a compiled ``backward`` without a derivative of its own: a second derivative raises.

    As ``torch.autograd.function.once_differentiable``, which however lets a second derivative pass, without
    its part through the saved tensors, where the incoming gradient does not require a gradient.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # no create_graph=True
            return results
        token = torch.zeros((), requires_grad=True)
        return tuple(None if result is None else _Refuse.apply(result, token) for result in results)

    return run


class _Refuse(torch.autograd.Function):
    """The identity, whose derivative raises."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, token: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        raise RuntimeError(
            "compiled loops have no second derivative: set the environment variable NUMBA_DISABLE_JIT=1, "
            "which runs torch's operators instead"
        )
