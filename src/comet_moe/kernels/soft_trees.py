"""Soft trees and their two-way softmax in one pass over the batch, with their gradient.

For sample b and tree j, log v of a node is the sum of the log branch probabilities above it, in heap order
(children of q: 2q+1, 2q+2; leaves from n-1 on). With A = α + log v over all leaves of all trees,

    parts = softmax(A),   weights_i = Σ_j parts_ji,   entropy = Σ_ji -v log(v + 1e-6)

Backward: dA = parts · (G - Σ parts G), then sums up the heap. A cut branch has v = 0 and gradient 0.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from comet_moe.kernels.jit import jit
from comet_moe.kernels.threads import over_rows

EPSILON = 1e-6
COST = 40  # multiply-adds that a node's exponentials and logarithms are worth


class Trees(NamedTuple):
    """weights (B, n), parts (B, k, n), paths v (B, k, n), entropy (B,)."""

    weights: Tensor
    parts: Tensor
    paths: Tensor
    entropy: Tensor


def soft_trees(splits: Tensor, alphas: Tensor, gamma: float) -> Trees:
    """Split logits (B, k, n-1) and leaf logits (B, k, n) to weights and what belongs to them."""
    return Trees(*_SoftTrees.apply(splits, alphas, gamma))


class _SoftTrees(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, splits: Tensor, alphas: Tensor, gamma: float) -> tuple[Tensor, ...]:
        rows, k, n = alphas.shape
        splits = splits.contiguous()
        weights, entropy = alphas.new_empty(rows, n), alphas.new_empty(rows)
        parts, paths = (
            torch.empty_like(alphas, memory_format=torch.contiguous_format),
            alphas.new_empty(rows, k, n),
        )
        arrays = (
            splits.numpy(),
            alphas.contiguous().numpy(),
            weights.numpy(),
            parts.numpy(),
            paths.numpy(),
            entropy.numpy(),
        )
        over_rows(lambda first, last: _forward(first, last, gamma, *arrays), rows, COST * alphas.numel())
        ctx.save_for_backward(splits, parts, paths)
        ctx.gamma = gamma
        ctx.set_materialize_grads(False)
        return weights, parts, paths, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_weights: Tensor | None,
        grad_parts: Tensor | None,
        grad_paths: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> tuple[Tensor, Tensor, None]:
        splits, parts, paths = ctx.saved_tensors
        rows = len(parts)
        given = torch.zeros_like(parts) if grad_parts is None else grad_parts.clone()
        if grad_weights is not None:
            given += grad_weights.unsqueeze(1)
        on_paths = torch.zeros_like(paths) if grad_paths is None else grad_paths
        on_entropy = parts.new_zeros(rows) if grad_entropy is None else grad_entropy
        grad_splits, grad_alphas = torch.empty_like(splits), torch.empty_like(parts)
        arrays = (
            splits.numpy(),
            parts.numpy(),
            paths.numpy(),
            given.contiguous().numpy(),
            on_paths.contiguous().numpy(),
            on_entropy.contiguous().numpy(),
            grad_splits.numpy(),
            grad_alphas.numpy(),
        )
        over_rows(lambda first, last: _backward(first, last, ctx.gamma, *arrays), rows, COST * parts.numel())
        return grad_splits, grad_alphas, None


@jit
def _first_deep(n: int) -> int:
    """Heap index of the first leaf on the deepest level."""
    width = 1
    while width < n:
        width *= 2
    return width - 1


@jit
def _leaf_at(node: int, n: int, first_deep: int) -> int:
    """Position from left to right of the leaf at heap index ``node``: the deep ones come first."""
    if node >= first_deep:
        return node - first_deep
    return (2 * n - 1 - first_deep) + node - (n - 1)


@jit
def _log_sides(u: Any) -> Any:
    """Logarithms of the smooth-step h = (1/2 + u)² (3 - 2 (1/2 + u)) and of 1 - h, for |u| < 1/2."""
    half, two, three = type(u)(0.5), type(u)(2), type(u)(3)
    left, right = half + u, half - u
    return math.log(left * left * (three - two * left)), math.log(right * right * (three - two * right))


@jit
def _forward(
    first: int,
    last: int,
    gamma: float,
    splits: Any,
    alphas: Any,
    weights: Any,
    parts: Any,
    paths: Any,
    entropy: Any,
) -> None:
    _, k, n = alphas.shape
    kind = alphas.dtype.type
    half, epsilon = kind(0.5), kind(EPSILON)
    width = kind(gamma)
    first_deep = _first_deep(n)
    log_v = np.empty(2 * n - 1, alphas.dtype)
    for b in range(first, last):
        peak = kind(-np.inf)
        surprise = kind(0)
        for j in range(k):
            log_v[0] = 0
            for q in range(n - 1):
                u = splits[b, j, q] / width
                above = log_v[q]
                if u >= half:
                    log_v[2 * q + 1], log_v[2 * q + 2] = above, kind(-np.inf)
                elif u <= -half:
                    log_v[2 * q + 1], log_v[2 * q + 2] = kind(-np.inf), above
                else:
                    log_left, log_right = _log_sides(u)
                    log_v[2 * q + 1], log_v[2 * q + 2] = above + log_left, above + log_right
            for node in range(n - 1, 2 * n - 1):
                i = _leaf_at(node, n, first_deep)
                if log_v[node] == -np.inf:
                    paths[b, j, i], parts[b, j, i] = 0, -np.inf
                    continue
                v = math.exp(log_v[node])
                a = alphas[b, j, i] + log_v[node]
                paths[b, j, i], parts[b, j, i] = v, a
                peak = max(peak, a)
                surprise -= v * math.log(v + epsilon)
        entropy[b] = surprise
        total = kind(0)
        for j in range(k):
            for i in range(n):
                e = kind(0)
                if parts[b, j, i] != -np.inf:
                    e = math.exp(parts[b, j, i] - peak)
                    total += e
                parts[b, j, i] = e
        for i in range(n):
            weights[b, i] = 0
        for j in range(k):
            for i in range(n):
                parts[b, j, i] /= total
                weights[b, i] += parts[b, j, i]


@jit
def _backward(
    first: int,
    last: int,
    gamma: float,
    splits: Any,
    parts: Any,
    paths: Any,
    given: Any,
    on_paths: Any,
    on_entropy: Any,
    grad_splits: Any,
    grad_alphas: Any,
) -> None:
    _, k, n = parts.shape
    kind = parts.dtype.type
    half, epsilon = kind(0.5), kind(EPSILON)
    width = kind(gamma)
    first_deep = _first_deep(n)
    grad = np.empty(2 * n - 1, parts.dtype)
    for b in range(first, last):
        mean = kind(0)
        for j in range(k):
            for i in range(n):
                mean += parts[b, j, i] * given[b, j, i]
        for j in range(k):
            for node in range(n - 1, 2 * n - 1):
                i = _leaf_at(node, n, first_deep)
                v = paths[b, j, i]
                on_a = parts[b, j, i] * (given[b, j, i] - mean)
                grad_alphas[b, j, i] = on_a
                if v > 0:
                    slope = -math.log(v + epsilon) - v / (v + epsilon)
                    on_a += v * (on_paths[b, j, i] + on_entropy[b] * slope)
                grad[node] = on_a
            for q in range(n - 2, -1, -1):
                on_left, on_right = grad[2 * q + 1], grad[2 * q + 2]
                grad[q] = on_left + on_right
                u = splits[b, j, q] / width
                if u >= half or u <= -half:
                    grad_splits[b, j, q] = 0
                else:
                    left, right = half + u, half - u
                    by_left = kind(2) / left - kind(2) / (kind(3) - kind(2) * left)
                    by_right = kind(2) / right - kind(2) / (kind(3) - kind(2) * right)
                    grad_splits[b, j, q] = (on_left * by_left - on_right * by_right) / width
