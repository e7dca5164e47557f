"""The weighted sum of expert outputs, fused with what comes just before it: ReLU and dropout.

Shapes: M rows of expert outputs z (M, u), one a (sample, expert) pair; T gates; B samples. Pair m stands in
row ``place[m]`` of z; the pairs of sample b are start[b]..start[b+1]-1. With f(z) = dropout(relu(z)),

    y[b, t] = Σ_m weights[m, t] f(z[place[m]])

One pass over z forward and one backward; f is recomputed, never stored. Dropout of 1/2 takes one random bit
an element, any other 32: a hash of (seed, element), so that forward and backward agree.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from comet_moe.kernels.jit import can_run_compiled, jit
from comet_moe.kernels.threads import over_rows


class Epilogue(NamedTuple):
    """What is applied to expert outputs before they are mixed."""

    relu: bool = False
    dropout: float = 0.0


class Places(NamedTuple):
    """Where the pairs stand: ``place`` (M,) rows of z, ``start`` (B + 1,) first pair of each sample."""

    place: Tensor
    start: Tensor


def mix(z: Tensor, weights: Tensor, places: Places, epilogue: Epilogue) -> Tensor:
    """(M, u), (M, T) -> (B, T, u)."""
    if can_run_compiled(z, weights) and z.dtype == weights.dtype:
        seed = int(torch.randint(2**62, ())) if epilogue.dropout else 0
        return _Mix.apply(z, weights, places, epilogue, seed)
    return mix_torch(z, weights, places, epilogue)


def mix_torch(z: Tensor, weights: Tensor, places: Places, epilogue: Epilogue) -> Tensor:
    """The definition, but for the source of its random numbers."""
    z = apply_epilogue(z, epilogue)
    lengths = places.start.diff()
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=z.device), lengths)
    weighted = weights.unsqueeze(-1) * z[places.place].unsqueeze(1)
    return z.new_zeros(len(lengths), weights.shape[1], z.shape[1]).index_add(0, sample, weighted)


def mix_dense(z: Tensor, weights: Tensor, epilogue: Epilogue) -> Tensor:
    """The same where every sample has all n experts: (B, n, u), (B, T, n) -> (B, T, u)."""
    samples, experts, u = z.shape
    if can_run_compiled(z, weights) and z.dtype == weights.dtype:
        pairs = samples * experts
        places = Places(torch.arange(pairs), torch.arange(0, pairs + 1, experts))
        by_pair = weights.transpose(1, 2).reshape(pairs, weights.shape[1])
        return mix(z.reshape(pairs, u), by_pair, places, epilogue)
    return torch.bmm(weights, apply_epilogue(z, epilogue))


def gather_rows(x: Tensor, rows: Tensor, places: Places) -> Tensor:
    """x[rows], with a backward pass that gathers too: (B, p), (M,) -> (M, p)."""
    if can_run_compiled(x):
        return _GatherRows.apply(x, rows, places)
    return x[rows]


def apply_epilogue(z: Tensor, epilogue: Epilogue) -> Tensor:
    """The epilogue as torch operations."""
    if epilogue.relu:
        z = z.relu()
    return torch.nn.functional.dropout(z, epilogue.dropout) if epilogue.dropout else z


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ones = grad.new_ones(len(grad), 1)
        return mix(grad, ones, ctx.places, Epilogue()).squeeze(1), None, None


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, weights: Tensor, places: Places, epilogue: Epilogue, seed: int
    ) -> Tensor:
        z, weights = z.contiguous(), weights.contiguous()
        ctx.save_for_backward(z, weights, *places)
        ctx.epilogue, ctx.seed = epilogue, seed
        samples = len(places.start) - 1
        out = z.new_empty(samples, weights.shape[1], z.shape[1])
        arrays = (z.numpy(), weights.numpy(), places.place.numpy(), places.start.numpy(), out.numpy())
        over_rows(
            lambda first, last: _forward(first, last, *arrays, epilogue.relu, epilogue.dropout, seed),
            samples,
            z.numel() * weights.shape[1],
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, weights, place, start = ctx.saved_tensors
        epilogue: Epilogue = ctx.epilogue
        grad_z, grad_weights = torch.empty_like(z), torch.empty_like(weights)
        arrays = (
            z.numpy(),
            weights.numpy(),
            place.numpy(),
            start.numpy(),
            grad.contiguous().numpy(),
            grad_z.numpy(),
            grad_weights.numpy(),
        )
        over_rows(
            lambda first, last: _backward(first, last, *arrays, epilogue.relu, epilogue.dropout, ctx.seed),
            len(start) - 1,
            2 * z.numel() * weights.shape[1],
        )
        return grad_z, grad_weights, None, None, None


@jit
def _hash(seed: Any, index: Any) -> Any:
    """64 random bits of (seed, index): the finaliser of splitmix64."""
    x = np.uint64(seed) + np.uint64(index) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@jit
def _factors(row: Any, z: Any, relu: bool, dropout: float, seed: int, factor: Any) -> None:
    """factor (u,) such that f(z[row]) = factor · z[row]: 0 or the scale of dropout."""
    u = z.shape[1]
    kind = z.dtype.type
    one, zero = kind(1), kind(0)
    if dropout == 0:
        for c in range(u):
            factor[c] = one
    elif dropout == 0.5:
        words = (u + 63) // 64
        for w in range(words):
            bits = _hash(seed, row * words + w)
            low, high = np.uint32(bits & np.uint64(0xFFFFFFFF)), np.uint32(bits >> np.uint64(32))
            first = 64 * w
            for c in range(min(32, u - first)):
                factor[first + c] = kind(2) * kind((low >> np.uint32(c)) & np.uint32(1))
            for c in range(min(32, u - first - 32)):
                factor[first + 32 + c] = kind(2) * kind((high >> np.uint32(c)) & np.uint32(1))
    else:
        limit = np.uint64(dropout * 4294967296.0)
        scale = kind(1.0 / (1.0 - dropout))
        for c in range(u):
            bits = _hash(seed, row * u + c) >> np.uint64(32)
            factor[c] = scale if bits >= limit else zero
    if relu:
        for c in range(u):
            factor[c] = zero if z[row, c] <= zero else factor[c]  # NaN stays


@jit
def _forward(
    first: int,
    last: int,
    z: Any,
    weights: Any,
    place: Any,
    start: Any,
    out: Any,
    relu: bool,
    dropout: float,
    seed: int,
) -> None:
    tasks, u = out.shape[1], out.shape[2]
    value = np.empty(u, z.dtype)
    for b in range(first, last):
        for t in range(tasks):
            for c in range(u):
                out[b, t, c] = 0
        for m in range(start[b], start[b + 1]):
            row = place[m]
            if relu or dropout != 0:
                _factors(row, z, relu, dropout, seed, value)
                for c in range(u):
                    value[c] = value[c] * z[row, c] if value[c] != 0 else value[c]
            else:
                for c in range(u):
                    value[c] = z[row, c]
            for t in range(tasks):
                weight = weights[m, t]
                if weight != 0:
                    for c in range(u):
                        out[b, t, c] += weight * value[c]


@jit
def _backward(
    first: int,
    last: int,
    z: Any,
    weights: Any,
    place: Any,
    start: Any,
    grad: Any,
    grad_z: Any,
    grad_weights: Any,
    relu: bool,
    dropout: float,
    seed: int,
) -> None:
    tasks, u = grad.shape[1], grad.shape[2]
    factor = np.empty(u, z.dtype)
    total = np.empty(u, z.dtype)
    for b in range(first, last):
        for m in range(start[b], start[b + 1]):
            row = place[m]
            _factors(row, z, relu, dropout, seed, factor)
            for c in range(u):
                total[c] = 0
            for t in range(tasks):
                weight = weights[m, t]
                dot = z.dtype.type(0)
                for c in range(u):
                    dot += grad[b, t, c] * (factor[c] * z[row, c] if factor[c] != 0 else factor[c])
                    total[c] += weight * grad[b, t, c]
                grad_weights[m, t] = dot
            for c in range(u):
                grad_z[row, c] = total[c] * factor[c]
