"""One step of Adam on some rows of a parameter, which reads and writes no other row.

Shapes: a parameter of n rows with w values; its gradient names r of the rows, each once.
"""

from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from comet_moe.kernels.jit import can_run_compiled, jit
from comet_moe.kernels.threads import count_threads, over_rows


class AdamStep(NamedTuple):
    """The numbers of one step, in the form of ``torch.optim.SparseAdam``: ``rate`` has both corrections."""

    rate: float
    beta1: float
    beta2: float
    eps: float


def adam_step(lr: float, betas: tuple[float, float], eps: float, step: int) -> AdamStep:
    """The numbers of step ``step``, counted from 1."""
    beta1, beta2 = betas
    return AdamStep(lr * sqrt(1 - beta2**step) / (1 - beta1**step), beta1, beta2, eps)


def move_rows(
    weight: Tensor, average: Tensor, square: Tensor, row: Tensor, grad: Tensor, step: AdamStep
) -> None:
    """Move rows of ``weight`` and of the averages of its gradient and of their squares, in place.

    Args:
        weight, average, square: (n, w), contiguous.
        row: (r,) int64, ascending, each once.
        grad: (r, w).
        step: the numbers of this step.
    """
    if len(row) and (int(row[0]) < 0 or int(row[-1]) >= len(weight)):
        raise ValueError(f"a gradient must name rows 0..{len(weight) - 1}, got {row[0]}..{row[-1]}")
    tensors = weight, average, square, grad
    # A table of many rows belongs to no small model, however few of them one step names.
    is_compiled = can_run_compiled(
        max(weight.numel(), grad.numel()), *(tensor.detach() for tensor in tensors)
    )
    if not is_compiled or len({tensor.dtype for tensor in tensors}) > 1:
        move_rows_torch(weight, average, square, row, grad, step)
        return
    parts = count_threads(len(row), 8 * grad.numel())  # a value is read and written in three tensors
    flat = [tensor.detach().view(-1) for tensor in (weight, average, square, grad.contiguous())]
    over_rows(_move, parts, len(row), *flat, row.contiguous(), grad.shape[1], *step)


def move_rows_torch(
    weight: Tensor, average: Tensor, square: Tensor, row: Tensor, grad: Tensor, step: AdamStep
) -> None:
    """The definition of :func:`move_rows`."""
    new_average = torch.lerp(average[row], grad, 1 - step.beta1)
    new_square = torch.lerp(square[row], grad.square(), 1 - step.beta2)
    average[row], square[row] = new_average, new_square
    weight.index_add_(0, row, new_average / (new_square.sqrt() + step.eps), alpha=-step.rate)


@jit
def _move(
    part: int,
    first: int,
    last: int,
    weight: Any,
    average: Any,
    square: Any,
    grad: Any,
    row: Any,
    width: int,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    kind = grad.dtype.type
    share1, share2, step, small = kind(1 - beta1), kind(1 - beta2), kind(rate), kind(eps)
    for r in range(first, last):
        to, of = row[r] * width, r * width
        for c in range(width):
            i, g = np.uint64(to + c), grad[np.uint64(of + c)]
            m = average[i] + share1 * (g - average[i])
            v = square[i] + share2 * (g * g - square[i])
            average[i], square[i] = m, v
            weight[i] -= step * m / (np.sqrt(v) + small)
