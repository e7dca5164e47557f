"""n linear maps of one shape, on shared rows, on separate rows, or on groups of rows."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe import checks
from comet_moe.kernels.grouped_mm import can_group, grouped_mm, grouped_mm_backward, sorted_mm

ALIGNED = 8
"""Number of 16-bit values in 16 bytes."""


class GroupedLinear(nn.Module):
    """y = W_e x + b_e for n experts e.

    Attributes:
        weight: (n, out, in), each Glorot-uniform.
        bias: (n, out), zero.
    """

    def __init__(self, num_experts: int, in_features: int, out_features: int):
        super().__init__()
        for name, value in (
            ("num_experts", num_experts),
            ("in_features", in_features),
            ("out_features", out_features),
        ):
            checks.at_least_one(name, value)
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(num_experts, out_features))
        for expert in self.weight:
            nn.init.xavier_uniform_(expert)

    def flops(self) -> int:
        """Floating-point operations on one row: 2 · in · out."""
        return 2 * self.weight.shape[1:].numel()

    def shared(self, x: Tensor) -> Tensor:
        """Every expert on every row, one matrix product: (B, in) -> (B, n, out)."""
        return F.linear(x, self.weight.flatten(0, 1), self.bias.flatten()).unflatten(-1, self.bias.shape)

    def each(self, x: Tensor) -> Tensor:
        """Every expert on its own rows: (B, n, in) -> (B, n, out)."""
        rows = torch.baddbmm(self.bias.unsqueeze(1), x.transpose(0, 1), self.weight.transpose(1, 2))
        return rows.transpose(0, 1)

    def one(self, rows: Tensor, expert: int) -> Tensor:
        """One expert on rows: (m, in) -> (m, out)."""
        return F.linear(rows, self.weight[expert], self.bias[expert])

    def grouped(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Each expert on its slice of ``rows``: (M, in) -> (M, out)."""
        return grouped_linear(rows, self.weight, self.bias, counts)

    def sorted_rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Each expert on its rows, which end at ``offsets`` (n,): (M, in) -> (M, out)."""
        return sorted_linear(rows, self.weight, self.bias, offsets)


def sorted_linear(rows: Tensor, weight: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """Like :func:`grouped_linear`, with static shapes and no value that the host must read.

    Args:
        rows: (M, in), sorted by expert.
        weight, bias: (n, out, in), (n, out).
        offsets: (n,) int32, where the rows of each expert end. Rows after the last offset belong to no
            expert; their outputs and gradients are 0.
    """
    rows, weight, bias = _autocast(rows, weight, bias)
    outputs, inputs = weight.shape[1:]
    # Rows of all matrices must begin at multiples of 16 bytes.
    pad_in, pad_out = -inputs % ALIGNED, -outputs % ALIGNED
    if pad_in or pad_out:
        rows, weight = F.pad(rows, (0, pad_in)), F.pad(weight, (0, pad_in, 0, pad_out))
    product = sorted_mm(rows.contiguous(), weight.transpose(1, 2), offsets)
    row = torch.arange(rows.shape[0], device=rows.device)
    expert = torch.searchsorted(offsets, row, right=True)
    is_used = (row < offsets[-1]).unsqueeze(-1)
    own_bias = bias[expert.clamp_max(weight.shape[0] - 1)]
    return torch.where(is_used, product[:, :outputs] + own_bias, 0)


def _autocast(rows: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors in the dtype of autocast if it is on; float64 is kept."""
    if checks.is_autocast(rows) and rows.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(rows.device.type)
        return rows.to(dtype), weight.to(dtype), bias.to(dtype)
    return rows, weight, bias


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor, counts: list[int]) -> Tensor:
    """Expert e on its ``counts[e]`` consecutive rows: (M, in), (n, out, in), (n, out) -> (M, out)."""
    given = np.array(counts)
    is_valid = given.dtype.kind == "i" and given.shape == weight.shape[:1] and (given >= 0).all()
    if not is_valid or given.sum() != len(rows):
        raise ValueError(
            f"counts must be {len(weight)} integers of at least 0 that sum to {len(rows)} rows, got "
            f"{repr(counts)[:200]}"
        )
    if rows.shape[1:] != weight.shape[2:]:
        raise ValueError(f"rows must have shape (M, {weight.shape[2]}), got {tuple(rows.shape)}")
    rows, weight, bias = _autocast(rows, weight, bias)
    if checks.in_functorch_transform():  # which takes torch's operators only
        return torch.cat([F.linear(*of_one) for of_one in zip(rows.split(counts), weight, bias, strict=True)])
    return _GroupedLinear.apply(rows, weight, bias, counts)


class _GroupedLinear(torch.autograd.Function):
    """Contiguous slices of rows, one matrix product per expert that has rows, no copies.

    As in ``F.linear``, a product that no gradient needs is not computed, and its factor is not saved.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, counts: list[int]) -> Tensor:
        rows_need_grad, weight_needs_grad, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rows if weight_needs_grad else None, weight if rows_need_grad else None)
        ctx.counts = counts
        if can_group(len(rows) * weight.shape[1:].numel(), rows, weight, bias):
            return grouped_mm(rows, weight, bias, _stops(counts))
        out = rows.new_empty(rows.shape[0], weight.shape[1])
        for expert, start, stop in _slices(counts):
            torch.addmm(bias[expert], rows[start:stop], weight[expert].t(), out=out[start:stop])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        rows_need_grad, weight_needs_grad, bias_needs_grad, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # for second derivatives: differentiable operators
            slices = grad.split(ctx.counts)
            return (
                torch.cat([g @ w for g, w in zip(slices, weight, strict=True)]) if rows_need_grad else None,
                torch.stack([g.t() @ r for g, r in zip(slices, rows.split(ctx.counts), strict=True)])
                if weight_needs_grad
                else None,
                torch.stack([g.sum(0) for g in slices]) if bias_needs_grad else None,
                None,
            )
        grad = grad.contiguous()
        given = [tensor for tensor in (grad, rows, weight) if tensor is not None]
        if can_group(grad.numel() * (given[-1].shape[-1] if len(given) > 1 else 1), *given):
            grads = grouped_mm_backward(grad, rows, weight, _stops(ctx.counts), bias_needs_grad)
            return *grads, None
        experts, width = len(ctx.counts), grad.shape[1]
        grad_rows = grad.new_empty(len(grad), weight.shape[2]) if rows_need_grad else None
        grad_weight = grad.new_zeros(experts, width, rows.shape[1]) if weight_needs_grad else None
        grad_bias = grad.new_zeros(experts, width) if bias_needs_grad else None
        for expert, start, stop in _slices(ctx.counts):
            part = grad[start:stop]
            if grad_rows is not None:
                torch.mm(part, weight[expert], out=grad_rows[start:stop])
            if grad_weight is not None:
                torch.mm(part.t(), rows[start:stop], out=grad_weight[expert])
            if grad_bias is not None:
                torch.sum(part, 0, out=grad_bias[expert])
        return grad_rows, grad_weight, grad_bias, None


def _stops(counts: list[int]) -> Tensor:
    """Where the rows of each expert end."""
    return torch.tensor(counts).cumsum(0)


def _slices(counts: list[int]) -> Iterator[tuple[int, int, int]]:
    """For each expert that has rows: the expert, its first row, and the row after its last."""
    stop = 0
    for expert, count in enumerate(counts):
        start, stop = stop, stop + count
        if count:
            yield expert, start, stop
