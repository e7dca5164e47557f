"""SwiGLU in one pass over its input, with its gradient.

Shapes: M rows, h features. With the halves (a, b) of a row of x (M, 2h) and s = 1 / (1 + exp(-a)),

    y = a s b,   dx = (g b s (1 + a (1 - s)), g a s)   for the gradient g of y

torch's operators read and write the halves once for each of them. x and y may be bfloat16; the loops compute
in float32.
"""

from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from comet_moe.kernels.autograd import differentiable_backward
from comet_moe.kernels.jit import can_run_compiled, is_plain_cpu, jit
from comet_moe.kernels.members import in_order
from comet_moe.kernels.mix import load, store
from comet_moe.kernels.threads import count_threads, over_rows

SIGMOID_COST = 8
"""Multiply-adds that take as long as a sigmoid."""


def swiglu(x: Tensor) -> Tensor:
    """silu(a) · b of the halves (a, b): (..., 2h) -> (..., h)."""
    has_type = x.dtype in (torch.float32, torch.bfloat16)
    if has_type and is_plain_cpu(x) and can_run_compiled(SIGMOID_COST * x.numel()):
        return _SwiGLU.apply(x)
    return swiglu_torch(x)


def swiglu_torch(x: Tensor) -> Tensor:
    """The definition, by torch's operators."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        rows = _as_rows(x)
        out = rows.new_empty(len(rows), x.shape[-1] // 2)
        over_rows(_forward, count_threads(len(rows), SIGMOID_COST * out.numel()), len(rows), rows, out)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            (result,) = differentiable_backward(swiglu_torch, (x,), [grad], (True,))
            return (result,)
        rows = _as_rows(x)
        grad_rows = torch.empty_like(rows)
        parts = count_threads(len(rows), 2 * SIGMOID_COST * grad.numel())
        over_rows(_backward, parts, len(rows), rows, _as_rows(grad), grad_rows)
        return (grad_rows.reshape(x.shape),)


def _as_rows(x: Tensor) -> Tensor:
    """(..., width) -> (M, width), contiguous."""
    return in_order(x.reshape(prod(x.shape[:-1]), x.shape[-1]))


@jit(reassociates=False)
def _sigmoid(a: Any) -> Any:
    """1 / (1 + exp(-a)) in float32, by operations that vectorise.

    exp(t) = 2^n exp(r) with t = n log 2 + r and |r| <= log(2) / 2. exp(r) is its series up to r^7 / 7!, whose
    next term is below 2^-24. log 2 is subtracted in two parts, the first of few bits, so that n times
    it is exact.
    """
    one = np.float32(1)
    t = min(max(-a, np.float32(-87)), np.float32(88))
    n = np.floor(t * np.float32(1.4426950408889634) + np.float32(0.5))
    r = (t - n * np.float32(0.693359375)) + n * np.float32(2.1219444005469057e-4)
    series = np.float32(1 / 5040) * r + np.float32(1 / 720)
    series = series * r + np.float32(1 / 120)
    series = series * r + np.float32(1 / 24)
    series = series * r + np.float32(1 / 6)
    series = series * r + np.float32(1 / 2)
    series = (series * r + one) * r + one
    power = np.int32(np.int32(np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return one / (one + series * power)


@jit(reassociates=False)
def _forward(part: int, first: int, last: int, x: Any, out: Any) -> None:
    half = out.shape[1]
    for row in range(first, last):
        for c in range(half):
            a = load(x[row, c])
            store(out, (row, c), a * _sigmoid(a) * load(x[row, half + c]))


@jit(reassociates=False)
def _backward(part: int, first: int, last: int, x: Any, grad: Any, grad_x: Any) -> None:
    half = grad.shape[1]
    one = np.float32(1)
    for row in range(first, last):
        # As arrays of their own, whose overlap is checked once, both halves are written by one loop.
        gates, ups = x[row, :half], x[row, half:]
        grad_gates, grad_ups = grad_x[row, :half], grad_x[row, half:]
        for c in range(half):
            a, b, g = load(gates[c]), load(ups[c]), load(grad[row, c])
            s = _sigmoid(a)
            store(grad_gates, c, g * b * s * (one + a * (one - s)))
            store(grad_ups, c, g * a * s)
