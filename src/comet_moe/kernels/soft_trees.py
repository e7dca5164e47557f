"""Soft trees and their softmax over trees and leaves in one pass over the batch, with their gradient.

A tree with n leaves, for any n, is a heap. Internal nodes are 0..n-2, the children of q are 2q+1 (left) and
2q+2 (right), every index from n-1 on is a leaf. With d = ceil(log2 n) that gives 2n - 2^d leaves at depth d
and 2^d - n at depth d-1. Experts are the leaves from left to right, so the deep leaves come first.

For sample b and tree j, log v of a node is the sum of the log branch probabilities above it. With
A = α + log v over all leaves of all trees,

    contributions = softmax(A),   weights_i = Σ_j contributions_ji,   entropy = Σ_ji -v log(v + 1e-6)

Backward: with G the gradient of the contributions, dA = contributions · (G - Σ contributions G), then sums up
the heap. A branch of probability 0 has v = 0 and gradient 0.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from comet_moe.kernels.autograd import differentiable_backward
from comet_moe.kernels.jit import can_run_compiled, jit
from comet_moe.kernels.members import in_order
from comet_moe.kernels.nodes import first_deep_node, leaf_at, log_sides
from comet_moe.kernels.threads import count_threads, over_rows

EPSILON = 1e-6
NODE_COST = 400
"""Multiply-adds that take as long as the exponentials and logarithms of a node."""


class SoftTrees(NamedTuple):
    """weights (B, n), contributions (B, k, n), paths v (B, k, n), entropy (B,)."""

    weights: Tensor
    contributions: Tensor
    paths: Tensor
    entropy: Tensor


def soft_trees(splits: Tensor, alphas: Tensor, gamma: float) -> SoftTrees:
    """Split logits (B, k, n-1) and leaf logits α (B, k, n), of one type, to the weights of soft trees."""
    if alphas.dim() != 3:
        raise ValueError(f"leaf logits must have shape (B, k, n), got {tuple(alphas.shape)}")
    rows, k, n = alphas.shape
    if splits.shape != (rows, k, n - 1) or splits.dtype != alphas.dtype:
        raise ValueError(
            f"splits must have shape {(rows, k, n - 1)} and dtype {alphas.dtype} for leaf logits "
            f"{(rows, k, n)}, got {tuple(splits.shape)} and {splits.dtype}"
        )
    if can_run_compiled(NODE_COST * alphas.numel(), splits, alphas):
        return SoftTrees(*_SoftTrees.apply(splits, alphas, gamma))
    return soft_trees_torch(splits, alphas, gamma)


def soft_trees_torch(splits: Tensor, alphas: Tensor, gamma: float | Tensor) -> SoftTrees:
    """The definition: paths in log space and one softmax over trees and leaves."""
    log_paths = path_sums(*log_smooth_step_sides(splits, gamma))
    contributions = (alphas + log_paths).flatten(-2).softmax(-1).unflatten(-1, alphas.shape[-2:])
    paths = log_paths.exp()
    entropy = -(paths * (paths + EPSILON).log()).sum((-2, -1))
    return SoftTrees(contributions.sum(-2), contributions, paths, entropy)


def path_sums(left: Tensor, right: Tensor) -> Tensor:
    """Sum of the edge values on the path to each leaf.

    Args:
        left: (..., n-1) values of the edges to the left children, in heap order.
        right: (..., n-1) the same to the right.

    Returns:
        (..., n), leaves from left to right.
    """
    internal = left.shape[-1]
    sums = left.new_zeros(*left.shape[:-1], 1)
    first, width = 0, 1
    while first < internal:
        splits = min(width, internal - first)  # below the full width only on the last level
        edges = torch.stack((left[..., first : first + splits], right[..., first : first + splits]), -1)
        children = (sums[..., :splits].unsqueeze(-1) + edges).flatten(-2)
        sums = torch.cat((children, sums[..., splits:]), -1) if splits < width else children
        first, width = first + width, 2 * width
    return sums


def log_smooth_step_sides(t: Tensor, gamma: float | Tensor) -> tuple[Tensor, Tensor]:
    """(log h(t), log(1 - h(t))): -inf with gradient 0 where a side has probability 0, 0 where it has 1."""
    u = (t / gamma).clamp(-0.5, 0.5)
    return _log_cubic(0.5 + u), _log_cubic(0.5 - u)


def _log_cubic(a: Tensor) -> Tensor:
    cut = a == 0
    a = a.masked_fill(cut, 1.0)  # keeps 1/a, and with it the gradient of a cut side, finite
    return (2 * a.log() + torch.log(3 - 2 * a)).masked_fill(cut, float("-inf"))


class _SoftTrees(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, splits: Tensor, alphas: Tensor, gamma: float) -> tuple[Tensor, ...]:
        rows, k, n = alphas.shape
        weights, entropy = alphas.new_empty(rows, n), alphas.new_empty(rows)
        contributions, paths = alphas.new_empty(rows, k, n), alphas.new_empty(rows, k, n)
        results = (weights, contributions, paths, entropy)
        parts = count_threads(rows, NODE_COST * alphas.numel())
        over_rows(_forward, parts, rows, float(gamma), in_order(splits), in_order(alphas), *results)
        ctx.save_for_backward(splits, alphas, contributions, paths)
        ctx.gamma = gamma
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(
        ctx: Any,
        grad_weights: Tensor | None,
        grad_contributions: Tensor | None,
        grad_paths: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        splits, alphas, contributions, paths = ctx.saved_tensors
        if torch.is_grad_enabled():

            def definition(splits: Tensor, alphas: Tensor) -> tuple[Tensor, ...]:
                return soft_trees_torch(splits, alphas, ctx.gamma)

            grads = [grad_weights, grad_contributions, grad_paths, grad_entropy]
            needed = ctx.needs_input_grad[:2]
            by_splits, by_alphas = differentiable_backward(definition, (splits, alphas), grads, needed)
            return by_splits, by_alphas, None
        rows = len(contributions)
        total = torch.zeros_like(contributions) if grad_contributions is None else grad_contributions.clone()
        if grad_weights is not None:
            total += grad_weights.unsqueeze(1)
        if grad_paths is None:
            grad_paths = torch.zeros_like(paths)
        if grad_entropy is None:
            grad_entropy = paths.new_zeros(rows)
        grad_splits, grad_alphas = splits.new_empty(splits.shape), splits.new_empty(paths.shape)
        inputs = map(in_order, (splits, contributions, paths, total, grad_paths, grad_entropy))
        parts = count_threads(rows, NODE_COST * paths.numel())
        over_rows(_backward, parts, rows, float(ctx.gamma), *inputs, grad_splits, grad_alphas)
        return grad_splits, grad_alphas, None


@jit
def _forward(
    part: int,
    first: int,
    last: int,
    gamma: float,
    splits: Any,
    alphas: Any,
    weights: Any,
    contributions: Any,
    paths: Any,
    entropy: Any,
) -> None:
    _, k, n = alphas.shape
    kind = alphas.dtype.type
    half, epsilon = kind(0.5), kind(EPSILON)
    width = kind(gamma)
    first_deep = first_deep_node(n)
    log_v = np.empty(2 * n - 1, alphas.dtype)
    for b in range(first, last):
        peak = kind(-np.inf)
        surprise = kind(0)
        for j in range(k):
            log_v[0] = 0
            for q in range(n - 1):
                above = log_v[q]
                if above == -np.inf:  # no need to guess the side of a split that no path reaches
                    log_v[2 * q + 1], log_v[2 * q + 2] = above, above
                    continue
                u = splits[b, j, q] / width
                if u >= half:
                    log_v[2 * q + 1], log_v[2 * q + 2] = above, kind(-np.inf)
                elif u <= -half:
                    log_v[2 * q + 1], log_v[2 * q + 2] = kind(-np.inf), above
                else:
                    log_left, log_right = log_sides(u)
                    log_v[2 * q + 1], log_v[2 * q + 2] = above + log_left, above + log_right
            for node in range(n - 1, 2 * n - 1):
                i = leaf_at(node, n, first_deep)
                if log_v[node] == -np.inf:
                    paths[b, j, i], contributions[b, j, i] = 0, -np.inf
                    continue
                v = math.exp(log_v[node])
                a = alphas[b, j, i] + log_v[node]
                paths[b, j, i], contributions[b, j, i] = v, a
                peak = max(peak, a)
                surprise -= v * math.log(v + epsilon)
        entropy[b] = surprise
        total = kind(0)
        for j in range(k):
            for i in range(n):
                e = kind(0)
                if contributions[b, j, i] != -np.inf:
                    e = math.exp(contributions[b, j, i] - peak)
                    total += e
                contributions[b, j, i] = e
        for i in range(n):
            weights[b, i] = 0
        for j in range(k):
            for i in range(n):
                contributions[b, j, i] /= total
                weights[b, i] += contributions[b, j, i]


@jit
def _backward(
    part: int,
    first: int,
    last: int,
    gamma: float,
    splits: Any,
    contributions: Any,
    paths: Any,
    total_grad: Any,
    grad_paths: Any,
    grad_entropy: Any,
    grad_splits: Any,
    grad_alphas: Any,
) -> None:
    _, k, n = contributions.shape
    kind = contributions.dtype.type
    half, epsilon = kind(0.5), kind(EPSILON)
    width = kind(gamma)
    first_deep = first_deep_node(n)
    grad = np.empty(2 * n - 1, contributions.dtype)
    for b in range(first, last):
        mean = kind(0)
        for j in range(k):
            for i in range(n):
                mean += contributions[b, j, i] * total_grad[b, j, i]
        for j in range(k):
            for node in range(n - 1, 2 * n - 1):
                i = leaf_at(node, n, first_deep)
                v = paths[b, j, i]
                grad_a = contributions[b, j, i] * (total_grad[b, j, i] - mean)
                grad_alphas[b, j, i] = grad_a
                if v > 0:
                    slope = -math.log(v + epsilon) - v / (v + epsilon)
                    grad_a += v * (grad_paths[b, j, i] + grad_entropy[b] * slope)
                grad[node] = grad_a
            for q in range(n - 2, -1, -1):
                grad_left, grad_right = grad[2 * q + 1], grad[2 * q + 2]
                grad[q] = grad_left + grad_right
                u = splits[b, j, q] / width
                if u >= half or u <= -half:
                    grad_splits[b, j, q] = 0
                else:
                    left, right = half + u, half - u
                    by_left = kind(2) / left - kind(2) / (kind(3) - kind(2) * left)
                    by_right = kind(2) / right - kind(2) / (kind(3) - kind(2) * right)
                    grad_splits[b, j, q] = (grad_left * by_left - grad_right * by_right) / width
