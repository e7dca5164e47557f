"""Rounds of "normalise rows, then columns" in log space, with their gradient.

One half round is y = x - logsumexp(x) along rows or columns; with p = exp(y) its gradient is
dx = dy - p · Σ dy. So the backward pass needs the p of each half round, and no exponential of its own.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comet_moe.kernels.autograd import differentiable_backward
from comet_moe.kernels.jit import can_run_compiled, jit
from comet_moe.kernels.members import in_order
from comet_moe.kernels.threads import over_rows

EXP_COST = 800
"""Multiply-adds that take as long as a round of one logit by torch's operators, most of which is overhead."""


def sinkhorn_rounds(logits: Tensor, iterations: int) -> Tensor:
    """exp of the logits after R rounds: (..., n, n) -> (..., n, n)."""
    if logits.dim() < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f"logits must be square matrices (..., n, n), got shape {tuple(logits.shape)}")
    work = EXP_COST * logits.numel() * iterations
    if iterations > 0 and can_run_compiled(work, logits) and logits.numel():
        return _Rounds.apply(logits, iterations)
    return sinkhorn_rounds_torch(logits, iterations)


def sinkhorn_rounds_torch(logits: Tensor, iterations: int) -> Tensor:
    """The definition."""
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()


class _Rounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int) -> Tensor:
        n = logits.shape[-1]
        work = logits.detach().reshape(-1, n, n).clone(memory_format=torch.contiguous_format)
        halves = work.new_empty(len(work), 2 * iterations, n, n)
        over_rows(_forward, 1, len(work), work, halves)
        ctx.save_for_backward(logits, halves)
        ctx.iterations = iterations
        return halves[:, -1].reshape(logits.shape).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        logits, halves = ctx.saved_tensors
        if torch.is_grad_enabled():

            def definition(logits: Tensor) -> Tensor:
                return sinkhorn_rounds_torch(logits, ctx.iterations)

            (grad_logits,) = differentiable_backward(definition, (logits,), [grad], (True,))
            return grad_logits, None
        soft = halves[:, -1]
        work = in_order(grad.reshape(soft.shape) * soft)
        over_rows(_backward, 1, len(work), work, in_order(halves))
        return work.reshape(grad.shape), None


@jit
def _forward(part: int, first: int, last: int, work: Any, halves: Any) -> None:
    """Overwrite ``work`` (T, n, n) round by round; ``halves`` (T, 2R, n, n) gets its exp after each half."""
    _, steps, n, _ = halves.shape
    peak = np.empty(n, work.dtype)
    total = np.empty(n, work.dtype)
    for tree in range(first, last):
        y = work[tree]
        for step in range(0, steps, 2):
            p = halves[tree, step]
            for i in range(n):
                top = y[i, 0]
                for j in range(1, n):
                    top = max(top, y[i, j])
                mass = y.dtype.type(0)
                for j in range(n):
                    p[i, j] = math.exp(y[i, j] - top)
                    mass += p[i, j]
                shift = top + math.log(mass)
                for j in range(n):
                    p[i, j] /= mass
                    y[i, j] -= shift
            p = halves[tree, step + 1]
            for j in range(n):
                peak[j] = y[0, j]
                total[j] = 0
            for i in range(1, n):
                for j in range(n):
                    peak[j] = max(peak[j], y[i, j])
            for i in range(n):
                for j in range(n):
                    p[i, j] = math.exp(y[i, j] - peak[j])
                    total[j] += p[i, j]
            for j in range(n):
                peak[j] += math.log(total[j])
            for i in range(n):
                for j in range(n):
                    p[i, j] /= total[j]
                    y[i, j] -= peak[j]


@jit
def _backward(part: int, first: int, last: int, grad: Any, halves: Any) -> None:
    """Overwrite ``grad`` (T, n, n), the gradient of the last logits, with that of the first ones."""
    _, steps, n, _ = halves.shape
    total = np.empty(n, grad.dtype)
    for tree in range(first, last):
        d = grad[tree]
        for step in range(steps - 2, -2, -2):
            p = halves[tree, step + 1]
            total[:] = 0
            for i in range(n):
                for j in range(n):
                    total[j] += d[i, j]
            for i in range(n):
                for j in range(n):
                    d[i, j] -= p[i, j] * total[j]
            p = halves[tree, step]
            for i in range(n):
                mass = d.dtype.type(0)
                for j in range(n):
                    mass += d[i, j]
                for j in range(n):
                    d[i, j] -= p[i, j] * mass
