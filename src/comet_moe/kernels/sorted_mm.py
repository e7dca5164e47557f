"""The products of experts and their rows, with counts that only the device knows, as torch operators.

Rows are sorted by expert; offsets (n,) int32 are where the rows of each expert end, and rows after the last
one are of no expert. ``F.grouped_mm`` computes the products; what it leaves unwritten is set to 0 here, so
that it reaches no output and no gradient. As operators of their own they can be in graphs in float32 too,
where torch has ``grouped_mm`` in bfloat16 only.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.library.custom_op("comet_moe::sorted_mm", mutates_args=())
def sorted_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Each row times the matrix of its expert: (M, p), (n, p, u), (n,) -> (M, u), 0 for rows of no expert."""
    product = F.grouped_mm(rows, weight, offs=offsets)
    row = torch.arange(rows.shape[0], device=rows.device)
    return product.masked_fill((row >= offsets[-1]).unsqueeze(-1), 0)


@torch.library.custom_op("comet_moe::sorted_outer", mutates_args=())
def sorted_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """The sum of the outer products of each expert's rows: (M, p), (M, u), (n,) -> (n, p, u)."""
    return F.grouped_mm(a.t(), b, offs=offsets)


@sorted_mm.register_fake
def _(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@sorted_outer.register_fake
def _(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    return (
        sorted_mm(grad, weight.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None,
        sorted_outer(rows, grad, offsets) if ctx.needs_input_grad[1] else None,
        None,
    )


sorted_mm.register_autograd(_backward, setup_context=_save)
