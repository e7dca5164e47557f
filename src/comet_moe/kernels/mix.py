"""The weighted sum of expert outputs, fused with the ReLU and dropout before it.

Shapes: M pairs (sample, expert) of nonzero weight, B samples, T gates, u outputs. Experts write their outputs
z (M, u) in the order of experts; pairs are numbered in the order of samples. Pair m is in row ``pair_row[m]``
of z; the pairs of sample b are start[b]..start[b+1]-1. With f(z) = dropout(relu(z)),

    y[b, t] = Σ_m weights[m, t] f(z[pair_row[m]])

One pass over z forward and one backward; f is recomputed, never stored. Dropout of 1/2 takes one random bit
per element, any other 32: a hash of (seed, element), so that forward and backward agree. z and y may be
bfloat16; weights and sums are float32 then.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from comet_moe.checks import no_autocast
from comet_moe.kernels.autograd import differentiable_backward
from comet_moe.kernels.jit import can_run_compiled, extends_numba, is_plain_cpu, jit
from comet_moe.kernels.members import in_order
from comet_moe.kernels.threads import count_threads, over_rows

VALUE_COST = 4
"""Multiply-adds that take as long as one value of z in the sum of one gate."""


class Epilogue(NamedTuple):
    """The functions that are applied to expert outputs before they are mixed: ReLU, then dropout."""

    relu: bool = False
    dropout: float = 0.0


class PairLayout(NamedTuple):
    """Where the pairs are: ``pair_row`` (M,) their rows of z, ``start`` (B + 1,) first pair of each sample.

    Compiled loops trust these indices: only :mod:`comet_moe.kernels.plan` makes them, from checked pairs.
    """

    pair_row: Tensor
    start: Tensor


def weights_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of the weights of outputs of type ``dtype``, in which they are summed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _can_mix_compiled(z: Tensor, weights: Tensor, tasks: int) -> bool:
    has_types = z.dtype == weights.dtype or (z.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
    return has_types and is_plain_cpu(z) and can_run_compiled(VALUE_COST * z.numel() * tasks, weights)


def mix(z: Tensor, weights: Tensor, layout: PairLayout, epilogue: Epilogue) -> Tensor:
    """(M, u), (M, T) -> (B, T, u), of the type of z."""
    pairs = len(layout.pair_row)
    if z.dim() != 2 or weights.dim() != 2 or len(z) != pairs or len(weights) != pairs:
        raise ValueError(
            f"outputs (M, u) and weights (M, T) must have one row for each of the {pairs} (sample, expert) "
            f"pairs, got shapes {tuple(z.shape)} and {tuple(weights.shape)}"
        )
    if _can_mix_compiled(z, weights, weights.shape[1]):
        seed = int(torch.randint(2**62, ())) if epilogue.dropout else 0
        return _Mix.apply(in_order(z), in_order(weights), layout, epilogue, seed)
    return mix_torch(z, weights, layout, epilogue)


def mix_torch(z: Tensor, weights: Tensor, layout: PairLayout, epilogue: Epilogue) -> Tensor:
    """The definition, by torch operators; dropout draws other random numbers than the compiled version."""
    z = apply_epilogue(z, epilogue)
    lengths = layout.start.diff()
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=z.device), lengths)
    weighted = weights.unsqueeze(-1) * z[layout.pair_row].unsqueeze(1)
    mixed = weighted.new_zeros(len(lengths), *weighted.shape[1:]).index_add(0, sample, weighted)
    return mixed.to(z.dtype)


def mix_dense(z: Tensor, weights: Tensor, epilogue: Epilogue) -> Tensor:
    """As :func:`mix`, where every sample has all n experts: (B, n, u), (B, T, n) -> (B, T, u)."""
    if z.dim() != 3 or weights.dim() != 3 or z.shape[:2] != (weights.shape[0], weights.shape[2]):
        raise ValueError(
            f"outputs (B, n, u) and weights (B, T, n) must agree in B and n, got shapes {tuple(z.shape)} and "
            f"{tuple(weights.shape)}"
        )
    samples, experts, u = z.shape
    if _can_mix_compiled(z, weights, weights.shape[1]):
        pairs = samples * experts
        layout = PairLayout(torch.arange(pairs), torch.arange(0, pairs + 1, experts))
        by_pair = weights.transpose(1, 2).reshape(pairs, weights.shape[1])
        return mix(z.reshape(pairs, u), by_pair, layout, epilogue)
    outputs = apply_epilogue(z, epilogue)
    with no_autocast(z):
        return torch.bmm(weights, outputs.to(weights.dtype)).to(z.dtype)


def gather_rows(x: Tensor, row_sample: Tensor, layout: PairLayout) -> Tensor:
    """x[row_sample], with a backward pass that gathers too: (B, p), (M,) -> (M, p)."""
    if _can_mix_compiled(x, torch.empty(0, dtype=weights_dtype(x.dtype)), 1):
        return _GatherRows.apply(x, row_sample, layout)
    return x[row_sample]


def apply_epilogue(z: Tensor, epilogue: Epilogue) -> Tensor:
    """The epilogue as torch operations."""
    if epilogue.relu:
        z = z.relu()
    return torch.nn.functional.dropout(z, epilogue.dropout) if epilogue.dropout else z


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row_sample: Tensor, layout: PairLayout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, row_sample)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ones = grad.new_ones(len(grad), 1, dtype=weights_dtype(grad.dtype))
        return mix(grad, ones, ctx.layout, Epilogue()).squeeze(1), None, None


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, weights: Tensor, layout: PairLayout, epilogue: Epilogue, seed: int
    ) -> Tensor:
        ctx.save_for_backward(z, weights, *layout)
        ctx.epilogue, ctx.seed = epilogue, seed
        samples = len(layout.start) - 1
        out = z.new_empty(samples, weights.shape[1], z.shape[1])
        parts = count_threads(samples, z.numel() * weights.shape[1])
        over_rows(_forward, parts, samples, z, weights, *layout, out, *epilogue, seed)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, weights, pair_row, start = ctx.saved_tensors
        epilogue: Epilogue = ctx.epilogue
        if torch.is_grad_enabled():
            layout = PairLayout(pair_row, start)
            factors = torch.empty_like(z, dtype=weights.dtype)
            over_rows(_fill_factors, 1, len(z), z, *epilogue, ctx.seed, factors)

            def definition(z: Tensor, weights: Tensor) -> Tensor:
                kept = factors * z.masked_fill(factors == 0, 0)
                return mix_torch(kept, weights, layout, Epilogue()).to(z.dtype)

            needs = ctx.needs_input_grad[:2]
            return *differentiable_backward(definition, (z, weights), [grad], needs), None, None, None
        grad_z, grad_weights = torch.empty_like(z), torch.empty_like(weights)
        grads = (in_order(grad), grad_z, grad_weights)
        parts = count_threads(len(start) - 1, 2 * z.numel() * weights.shape[1])
        over_rows(_backward, parts, len(start) - 1, z, weights, pair_row, start, *grads, *epilogue, ctx.seed)
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
    kind = factor.dtype.type
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
            factor[c] = zero if load(z[row, c]) <= zero else factor[c]  # NaN stays


@jit
def _fill_factors(
    part: int, first: int, last: int, z: Any, relu: bool, dropout: float, seed: int, factors: Any
) -> None:
    for row in range(first, last):
        _factors(row, z, relu, dropout, seed, factors[row])


@jit
def _forward(
    part: int,
    first: int,
    last: int,
    z: Any,
    weights: Any,
    pair_row: Any,
    start: Any,
    out: Any,
    relu: bool,
    dropout: float,
    seed: int,
) -> None:
    tasks, u = out.shape[1], out.shape[2]
    value = np.empty(u, weights.dtype)
    total = np.empty((tasks, u), weights.dtype)
    for b in range(first, last):
        for t in range(tasks):
            for c in range(u):
                total[t, c] = 0
        for m in range(start[b], start[b + 1]):
            row = pair_row[m]
            if relu or dropout != 0:
                _factors(row, z, relu, dropout, seed, value)
                for c in range(u):
                    value[c] = value[c] * load(z[row, c]) if value[c] != 0 else value[c]
            else:
                for c in range(u):
                    value[c] = load(z[row, c])
            for t in range(tasks):
                weight = weights[m, t]
                if weight != 0:
                    for c in range(u):
                        total[t, c] += weight * value[c]
        for t in range(tasks):
            for c in range(u):
                store(out, (b, t, c), total[t, c])


@jit
def _backward(
    part: int,
    first: int,
    last: int,
    z: Any,
    weights: Any,
    pair_row: Any,
    start: Any,
    grad: Any,
    grad_z: Any,
    grad_weights: Any,
    relu: bool,
    dropout: float,
    seed: int,
) -> None:
    tasks, u = grad.shape[1], grad.shape[2]
    factor = np.empty(u, weights.dtype)
    total = np.empty(u, weights.dtype)
    for b in range(first, last):
        for m in range(start[b], start[b + 1]):
            row = pair_row[m]
            _factors(row, z, relu, dropout, seed, factor)
            for c in range(u):
                total[c] = 0
            for t in range(tasks):
                weight = weights[m, t]
                dot = weights.dtype.type(0)
                for c in range(u):
                    value = factor[c] * load(z[row, c]) if factor[c] != 0 else factor[c]
                    dot += load(grad[b, t, c]) * value
                    total[c] += weight * load(grad[b, t, c])
                grad_weights[m, t] = dot
            for c in range(u):
                store(grad_z, (row, c), total[c] * factor[c])


# bfloat16 in compiled loops: its 16 bits are unsigned integers there, since numpy has no such type. It
# is the upper half of a float32: load adds a lower half of zeros, store rounds to the nearest, ties to even,
# as torch does. Loops compute in float32 in between; for arrays of floats both are the identity.


def load(value: Any) -> Any:
    """The number that an entry of an array stands for; for compiled functions only."""
    raise NotImplementedError


def store(array: Any, index: Any, value: Any) -> None:
    """``array[index] = value``, rounded to the type of ``array``; for compiled functions only."""
    raise NotImplementedError


@extends_numba
def _define_load_and_store() -> None:
    from numba import types
    from numba.extending import overload

    @overload(load)
    def _load(value: Any) -> Any:
        if value == types.uint16:

            def widen(value: Any) -> Any:
                return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)

            return widen

        def keep(value: Any) -> Any:
            return value

        return keep

    @overload(store)
    def _store(array: Any, index: Any, value: Any) -> Any:
        if array.dtype != types.uint16:

            def copy(array: Any, index: Any, value: Any) -> None:
                array[index] = value

            return copy

        def narrow(array: Any, index: Any, value: Any) -> None:
            bits = np.float32(value).view(np.uint32)
            is_odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
            rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + is_odd)
            # Rounding up could make an infinity of a NaN.
            is_nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            array[index] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded >> np.uint32(16))

        return narrow
