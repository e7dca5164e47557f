"""Second derivatives of functions whose first ones are compiled."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


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
        One gradient for each input, None where it is not needed, and zero where nothing depends on the input.
    """
    # One input may be computed from another, as where a model calls a gate on its own output. Through a view
    # of each, only what the definition itself does with it is differentiated.
    inputs = [tensor.view_as(tensor) for tensor in inputs]
    outputs = definition(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    used = [
        (out, grad)
        for out, grad in zip(outputs, grads, strict=True)
        if grad is not None and out.requires_grad  # a tree of one leaf is constant
    ]
    wanted = [tensor for tensor, needed in zip(inputs, needs_grad, strict=True) if needed]
    outs, outer = zip(*used, strict=True) if used else ((), ())
    gradients = iter(torch.autograd.grad(outs, wanted, outer, create_graph=True, materialize_grads=True))
    return tuple(next(gradients) if needed else None for needed in needs_grad)
