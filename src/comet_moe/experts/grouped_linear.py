"""n linear maps of one shape, on shared rows, on rows of their own, or on groups of rows."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from comet_moe import checks


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
        """2 · in · out."""
        return 2 * self.weight[0].numel()

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


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor, counts: list[int]) -> Tensor:
    """Expert e on its ``counts[e]`` consecutive rows: (M, in), (n, out, in), (n, out) -> (M, out)."""
    if torch.is_autocast_enabled(rows.device.type) and rows.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), bias.to(dtype)
    return _GroupedLinear.apply(rows, weight, bias, counts)


class _GroupedLinear(torch.autograd.Function):
    """Contiguous slices, one matrix product an expert that has rows, no copies."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        out = rows.new_empty(rows.shape[0], weight.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            if count:
                stop = start + count
                torch.addmm(bias[expert], rows[start:stop], weight[expert].t(), out=out[start:stop])
                start = stop
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight)
        grad_bias = weight.new_empty(weight.shape[:2])
        start = 0
        for expert, count in enumerate(ctx.counts):
            if not count:
                grad_weight[expert].zero_()
                grad_bias[expert].zero_()
                continue
            stop = start + count
            part = grad[start:stop]
            torch.mm(part.t(), rows[start:stop], out=grad_weight[expert])
            torch.sum(part, 0, out=grad_bias[expert])
            if grad_rows is not None:
                torch.mm(part, weight[expert], out=grad_rows[start:stop])
            start = stop
        return grad_rows, grad_weight, grad_bias, None
