"""Training of a COMET gate over visited nodes: only the nodes that rows visit are evaluated.

A saturated split has a derivative of exactly 0, and so has everything below its other side. So the backward
pass needs the leaves that rows reach and the soft splits above them, and no other node. Gradients are those
of all nodes, :mod:`comet_moe.kernels.soft_trees`, which tests compare them with. Shapes are those of
:mod:`comet_moe.kernels.tree_walk`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comet_moe.kernels.autograd import differentiable_backward
from comet_moe.kernels.gathered import dot, pairing
from comet_moe.kernels.jit import jit
from comet_moe.kernels.members import in_order
from comet_moe.kernels.soft_trees import log_smooth_step_sides
from comet_moe.kernels.threads import count_threads, over_rows
from comet_moe.kernels.tree_walk import Walk


def visit_trees(
    walk: Walk, x: Tensor, parameters: Sequence[Tensor], gamma: float, sparse: bool = False
) -> tuple[Tensor, Tensor]:
    """α + log v and log v of the leaves that were visited, (L,) each, differentiable.

    Args:
        walk: the visits that :func:`~comet_moe.kernels.tree_walk.walk_trees` found for these arguments.
        x: (B, p).
        parameters: weights and biases of splits and leaves.
        gamma: width of the smooth step.
        sparse: whether the gradients of the parameters are sparse tensors of the nodes that were visited.
    """
    leaf_logit, leaf_log_path = _VisitTrees.apply(x, *parameters, walk, gamma, sparse)
    return leaf_logit, leaf_log_path


def visit_trees_torch(walk: Walk, gamma: float, x: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of :func:`visit_trees`, for the visits of ``walk``."""
    split_weight, split_bias, leaf_weight, leaf_bias = (tensor.flatten(0, 1) for tensor in parameters)
    logits = (split_weight[walk.soft_node] * x[walk.soft_row]).sum(-1) + split_bias[walk.soft_node]
    sides = torch.stack(log_smooth_step_sides(logits, gamma), -1).flatten()  # by edge
    has_parent, parent = walk.soft_edge >= 0, walk.soft_edge // 2
    log_path = torch.where(has_parent, sides[walk.soft_edge.clamp_min(0)], 0.0) if len(sides) else sides
    while bool(has_parent.any()):  # each round doubles the length of the path that is summed
        above = parent.clamp_min(0)
        log_path = log_path + torch.where(has_parent, log_path[above], 0.0)
        parent = torch.where(has_parent, parent[above], -1)
        has_parent = parent >= 0
    alphas = (leaf_weight[walk.leaf_node] * x[walk.leaf_row]).sum(-1) + leaf_bias[walk.leaf_node]
    if not len(sides):
        return alphas, torch.zeros_like(alphas)
    edge = walk.leaf_edge.clamp_min(0)
    leaf_log_path = torch.where(walk.leaf_edge >= 0, sides[edge] + log_path[edge // 2], 0.0)
    return alphas + leaf_log_path, leaf_log_path


def node_logits(x: Tensor, weight: Tensor, bias: Tensor, row: Tensor, node: Tensor, sparse: bool) -> Tensor:
    """The logits of rows of ``x`` (B, p) at nodes, (M,), differentiable.

    Args:
        x: (B, p).
        weight, bias: (k, m, p), (k, m).
        row, node: (M,) int64; rows are ascending, and node q of tree j is j m + q.
        sparse: whether the gradients of ``weight`` and ``bias`` are sparse tensors of the visited nodes.
    """
    with torch.no_grad():
        table = weight.flatten(0, 1).unsqueeze(1)
        dots = dot(x.unsqueeze(1), table, pairing(row, node, len(x), len(table))).flatten()
        logit = dots + bias.flatten()[node]
    none, edge = node[:0], torch.full_like(node, -1)
    visits = none, none, none, logit[:0], row, node, edge, logit, torch.zeros_like(logit)
    walk = Walk(*visits, sums=None, visited=len(node), finite=True, cut=0)
    return visit_trees(walk, x, (weight.detach(), bias.detach(), weight, bias), 1.0, sparse)[0]


def softmax_by_row(logits: Tensor, row: Tensor, rows: int) -> Tensor:
    """The softmax over the entries of ``logits`` (L,) with the same row, (L,) int64 below ``rows``."""
    peak = logits.new_full((rows,), -math.inf).scatter_reduce(0, row, logits.detach(), "amax")
    e = (logits - peak[row]).exp()
    return e / e.new_zeros(rows).index_add(0, row, e)[row]


def renormalized(
    walk: Walk, leaf_logit: Tensor, log_path: Tensor, num_rows: int, num_trees: int, num_experts: int
) -> tuple[Tensor, Tensor]:
    """α + log v and log v of the leaves of ``walk``, with v divided by its sum over each row and tree."""
    if not walk.cut:
        return leaf_logit, log_path
    tree = walk.leaf_row * num_trees + walk.leaf_node // num_experts
    log_total = log_path.new_zeros(num_rows * num_trees).index_add(0, tree, log_path.exp()).log()[tree]
    return leaf_logit - log_total, log_path - log_total


class _VisitTrees(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        split_weight: Tensor,
        split_bias: Tensor,
        leaf_weight: Tensor,
        leaf_bias: Tensor,
        walk: Walk,
        gamma: float,
        sparse: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, split_weight, split_bias, leaf_weight, leaf_bias)
        ctx.walk, ctx.gamma, ctx.sparse = walk, gamma, sparse
        return walk.leaf_logit.clone(), walk.leaf_log_path.clone()

    @staticmethod
    def backward(ctx: Any, grad_logit: Tensor, grad_log_path: Tensor) -> tuple[Tensor | None, ...]:
        walk, inputs, needed = ctx.walk, ctx.saved_tensors, ctx.needs_input_grad[:5]
        if torch.is_grad_enabled():

            def definition(*inputs: Tensor) -> tuple[Tensor, ...]:
                return visit_trees_torch(walk, ctx.gamma, *inputs)

            outer = (grad_logit, grad_log_path)
            return *differentiable_backward(definition, inputs, outer, needed), None, None, None
        x, split_weight, _, leaf_weight, _ = inputs
        inputs_by_row, grad_alpha = in_order(x), in_order(grad_logit)
        grad_split = _split_grads(walk, ctx.gamma, grad_logit + grad_log_path)
        grads: list[Tensor | None] = [None] * 5
        if needed[0]:
            grads[0] = by_row = torch.zeros_like(inputs_by_row)
            for node, row, grad, weight in (
                (walk.leaf_node, walk.leaf_row, grad_alpha, leaf_weight),
                (walk.soft_node, walk.soft_row, grad_split, split_weight),
            ):
                _add_by_target(row, node, grad, in_order(weight), by_row)
        for first, node, row, grad in (
            (1, walk.soft_node, walk.soft_row, grad_split),
            (3, walk.leaf_node, walk.leaf_row, grad_alpha),
        ):
            weight, bias = inputs[first], inputs[first + 1]
            if ctx.sparse and (needed[first] or needed[first + 1]):
                grads[first : first + 2] = _sparse_grads(weight, bias, node, row, grad, inputs_by_row)
                continue
            if needed[first]:
                by_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format)
                _add_by_target(node, row, grad, inputs_by_row, by_weight)
                grads[first] = by_weight
            if needed[first + 1]:
                by_node = bias.new_zeros(bias.numel()).index_add_(0, node, grad)
                grads[first + 1] = by_node.view(bias.shape)
        return *grads, None, None, None


def _split_grads(walk: Walk, gamma: float, grad_log_path: Tensor) -> Tensor:
    """(S,) gradients of the logits of soft splits, from those of log v of the leaves (L,)."""
    grad = grad_log_path.new_empty(len(walk.soft_row))
    edges = grad.new_zeros(2 * len(grad))
    visits = walk.soft_share, walk.soft_edge, walk.leaf_edge
    over_rows(_climb, 1, len(grad), float(gamma), *visits, grad_log_path, edges, grad)
    return grad


def _sparse_grads(
    weight: Tensor, bias: Tensor, node: Tensor, row: Tensor, grad: Tensor, rows: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of ``weight`` (k, m, p) and ``bias`` (k, m), Σ grad · x and Σ grad, of visited nodes."""
    visited, target = node.unique(return_inverse=True)
    values = weight.new_zeros(len(visited), weight.shape[-1])
    _add_by_target(target, row, grad, rows, values)
    by_node = bias.new_zeros(len(visited)).index_add_(0, target, grad)
    indices = torch.stack((visited // weight.shape[1], visited % weight.shape[1]))
    return tuple(
        torch.sparse_coo_tensor(indices, of_nodes, like.shape, check_invariants=False, is_coalesced=True)
        for of_nodes, like in ((values, weight), (by_node, bias))
    )


def _add_by_target(target: Tensor, source: Tensor, factor: Tensor, values: Tensor, out: Tensor) -> None:
    """out[target[m]] += factor[m] · values[source[m]] for all m, rows of length p; one thread per target."""
    if not len(target):
        return
    by_target, order = target.sort(stable=True)
    unique, counts = by_target.unique_consecutive(return_counts=True)
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    width = values.shape[-1]
    parts = count_threads(len(unique), len(target) * width)
    given = width, starts, order, unique, source, factor, values.view(-1), out.view(-1)
    over_rows(_sum_segments, parts, len(unique), *given)


@jit
def _sum_segments(
    part: int,
    first: int,
    last: int,
    width: int,
    starts: Any,
    order: Any,
    target: Any,
    source: Any,
    factor: Any,
    values: Any,
    out: Any,
) -> None:
    for segment in range(first, last):
        to = target[segment] * width
        for position in range(starts[segment], starts[segment + 1]):
            m = order[position]
            f, of = factor[m], source[m] * width
            for c in range(width):
                out[np.uint64(to + c)] += f * values[np.uint64(of + c)]


@jit
def _climb(
    part: int,
    first: int,
    last: int,
    gamma: float,
    share: Any,
    edge: Any,
    leaf_edge: Any,
    grad_leaf: Any,
    grad_edge: Any,
    grad: Any,
) -> None:
    """Gradients of soft splits, last visit first, in one part: grad_edge collects those of the two sides."""
    kind = grad.dtype.type
    half, two, three, scale = kind(0.5), kind(2), kind(3), kind(1 / gamma)
    for leaf in range(len(leaf_edge)):
        if leaf_edge[leaf] >= 0:
            grad_edge[leaf_edge[leaf]] += grad_leaf[leaf]
    for s in range(len(edge) - 1, -1, -1):
        by_left, by_right = grad_edge[2 * s], grad_edge[2 * s + 1]
        if edge[s] >= 0:
            grad_edge[edge[s]] += by_left + by_right
        u = share[s]
        left, right = half + u, half - u
        slope_left = two / left - two / (three - two * left)
        slope_right = two / right - two / (three - two * right)
        grad[s] = (by_left * slope_left - by_right * slope_right) * scale
