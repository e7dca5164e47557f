"""n linear maps of one shape, on shared rows, on rows of their own, or on groups of rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe import checks
from comet_moe.checks import has_dispatch_mode
from comet_moe.kernels.threads import over_rows


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


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor, counts: list[int]) -> Tensor:
    """Expert e on its ``counts[e]`` consecutive rows: (M, in), (n, out, in), (n, out) -> (M, out)."""
    if len(counts) != len(weight) or sum(counts) != len(rows):
        raise ValueError(
            f"counts must be {len(weight)} numbers that sum to {len(rows)} rows, got {len(counts)} that "
            f"sum to {sum(counts)}"
        )
    if torch.is_autocast_enabled(rows.device.type) and rows.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), bias.to(dtype)
    return _GroupedLinear.apply(rows, weight, bias, counts)


class _GroupedLinear(torch.autograd.Function):
    """Contiguous slices, matrix products of slices and experts, no copies.

    As in ``F.linear``, a product that no gradient needs is not computed, and its factor not saved.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, counts: list[int]) -> Tensor:
        rows_need_grad, weight_needs_grad, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rows if weight_needs_grad else None, weight if rows_need_grad else None)
        ctx.counts, ctx.work = counts, weight[0].numel()
        out = rows.new_empty(rows.shape[0], weight.shape[1])

        def run(part: Slice) -> None:
            own = slice(part.first, part.last)
            torch.addmm(bias[part.expert], rows[own], weight[part.expert].t(), out=out[own])

        _over_slices(run, counts, ctx.work)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        rows_need_grad, weight_needs_grad, bias_needs_grad, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # for second derivatives: the same by operators that have one
            groups = grad.split(ctx.counts)
            return (
                torch.cat([g @ w for g, w in zip(groups, weight, strict=True)]) if rows_need_grad else None,
                torch.stack([g.t() @ r for g, r in zip(groups, rows.split(ctx.counts), strict=True)])
                if weight_needs_grad
                else None,
                torch.stack([g.sum(0) for g in groups]) if bias_needs_grad else None,
                None,
            )
        grad = grad.contiguous()
        experts, width = len(ctx.counts), grad.shape[1]
        grad_rows = grad.new_empty(len(grad), weight.shape[2]) if rows_need_grad else None
        grad_weight = grad.new_empty(experts, width, rows.shape[1]) if weight_needs_grad else None
        grad_bias = grad.new_empty(experts, width) if bias_needs_grad else None
        for expert, count in enumerate(ctx.counts):
            for unused in (grad_weight, grad_bias) if not count else ():
                if unused is not None:
                    unused[expert].zero_()

        def run(part: Slice) -> None:
            if grad_rows is not None:
                own = slice(part.first, part.last)
                torch.mm(grad[own], weight[part.expert], out=grad_rows[own])
            # Of an expert that several threads share, each sums all rows for its share of the outputs.
            outputs = slice(*(width * share // (part.stop - part.start) for share in part.shares))
            group = grad[part.start : part.stop, outputs]
            if grad_weight is not None:
                torch.mm(group.t(), rows[part.start : part.stop], out=grad_weight[part.expert, outputs])
            if grad_bias is not None:
                torch.sum(group, 0, out=grad_bias[part.expert, outputs])

        products = bool(rows_need_grad) + bool(weight_needs_grad)
        _over_slices(run, ctx.counts, products * ctx.work + width)
        return grad_rows, grad_weight, grad_bias, None


class Slice(NamedTuple):
    """Rows first..last-1, those that one thread works on of rows start..stop-1 of one expert."""

    expert: int
    start: int
    stop: int
    first: int
    last: int

    @property
    def shares(self) -> tuple[int, int]:
        """Where the thread's rows begin and end within those of the expert."""
        return self.first - self.start, self.last - self.start


def _over_slices(run: Callable[[Slice], None], counts: list[int], work: int) -> None:
    """Call ``run`` for the slices of all experts, cut so that each thread has as many rows.

    Products of a few hundred rows gain little from threads of their own, so each of torch's threads takes
    whole experts, one after the other, with products that run in that thread alone.

    Args:
        run: works on one slice.
        counts: number of rows of each expert.
        work: multiply-adds for one row.
    """
    rows = sum(counts)
    in_inference_mode = torch.is_inference_mode_enabled()

    def loop(first: int, last: int) -> None:
        # Modes are properties of a thread, and a thread of the team begins without any.
        with torch.inference_mode(in_inference_mode), torch.no_grad():
            start = 0
            for expert, count in enumerate(counts):
                stop = start + count
                if max(start, first) < min(stop, last):
                    run(Slice(expert, start, stop, max(start, first), min(stop, last)))
                start = stop

    if rows and has_dispatch_mode():  # such as the FLOP counter, which sees the operators of its own thread
        loop(0, rows)
    elif rows:
        over_rows(loop, rows, rows * work)
