"""Training of a COMET gate over visited nodes: each row walks down each tree, and only what it meets counts.

A saturated split has a derivative of exactly 0, and so has everything below its other side. So the backward
pass needs the leaves that rows reach and the soft splits above them, and no other node. Gradients are those
of all nodes, :mod:`comet_moe.kernels.soft_trees`, which tests compare them with.

Shapes: B rows, p features, k trees with n leaves, S visits of soft splits, L visits of leaves. An edge is 2 s
for the left side and 2 s + 1 for the right side of the visit s of a soft split. It names the nearest soft
split above a visit, and is -1 where there is none.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from comet_moe.kernels.autograd import as_array, differentiable_backward, parameters_as_arrays
from comet_moe.kernels.jit import jit
from comet_moe.kernels.soft_trees import _first_deep, _leaf_at, _log_sides, log_smooth_step_sides
from comet_moe.kernels.threads import count_threads, over_rows

GROUP = 8
"""Rows that walk together, so that the processor loads the weights of their next nodes at the same time."""
WALK_EXPERTS = 32
"""Number of experts from which rows walk; with fewer, one product for all nodes is as fast."""
WALK_SHARE = 0.25
"""Share of all nodes that rows may visit on average; beyond it one product for all nodes is faster."""
MOST_VISITS = 2**23
"""Visits of a batch at most, which take half a GB."""
SAMPLE_ROWS = 16
"""Rows whose mean number of visits decides early whether a batch visits too many nodes."""
FIRST_SLOTS = 8
"""Slots per row and tree at first; where they are too few on average, the batch walks again with more."""

DONE, FULL, TOO_SOFT = range(3)


class Walk(NamedTuple):
    """What the rows of a batch visit.

    Attributes:
        soft_row, soft_node, soft_edge: (S,) int64, a visit after that of the soft split above it. Node q of
            tree j is j (n-1) + q.
        soft_share: (S,) logit / γ of the split, within ±1/2.
        leaf_row, leaf_node, leaf_edge: (L,) int64. Leaf i of tree j is j n + i.
        leaf_logit: (L,) α + log v.
        leaf_log_path: (L,) log v.
        sums: (3, k, n-1) sums of r, r sign(d) and r |d| over all visits of each split. d is its logit and r
            the probability that the row reaches it. None if not asked for.
        visited: number of nodes and leaves that were evaluated.
        finite: whether all their logits are finite; if not, the rest is undefined.
    """

    soft_row: Tensor
    soft_node: Tensor
    soft_edge: Tensor
    soft_share: Tensor
    leaf_row: Tensor
    leaf_node: Tensor
    leaf_edge: Tensor
    leaf_logit: Tensor
    leaf_log_path: Tensor
    sums: Tensor | None
    visited: int
    finite: bool


def walk_trees(
    x: Tensor, parameters: Sequence[Tensor], gamma: float, mask: Tensor | None, with_sums: bool
) -> Walk | None:
    """Walk ``x`` (B, p) down the trees; None if rows visit too many nodes to gain by it.

    Args:
        x: on the CPU, of the type of the parameters.
        parameters: weights and biases of splits and leaves: (k, n-1, p), (k, n-1), (k, n, p), (k, n).
        gamma: width of the smooth step.
        mask: (B,) bool, False for rows that do not count in ``sums``; None if all do.
        with_sums: whether to compute ``sums``.
    """
    (k, n, p), rows = parameters[2].shape, as_array(x)
    trees = _read_nodes(parameters)
    share = min(int(WALK_SHARE * k * (2 * n - 1)), MOST_VISITS // max(len(rows), 1))
    limit = max(2 * k * n.bit_length(), share)  # visits of a row on average
    is_row = np.empty(0, np.bool_) if mask is None else as_array(mask)
    parts = count_threads(len(rows), len(rows) * k * n.bit_length() * p)
    capacity = min(FIRST_SLOTS * k, limit)
    while True:
        shape = len(rows) * capacity
        softs = [np.empty(shape, kind) for kind in (*3 * (np.int64,), rows.dtype)]
        leaves = [np.empty(shape, kind) for kind in (*3 * (np.int64,), rows.dtype, rows.dtype)]
        sums = np.zeros((parts, 3, k, n - 1 if with_sums else 0), rows.dtype)
        summary = np.zeros((parts, 6), np.int64)
        over_rows(
            _walk,
            parts,
            len(rows),
            rows,
            *trees,
            k,
            gamma,
            is_row,
            capacity,
            limit,
            *softs,
            *leaves,
            sums,
            summary,
        )
        if (summary[:, 2] == DONE).all():
            break
        if (summary[:, 2] == TOO_SOFT).any() or capacity == limit:
            return None
        capacity = min(8 * capacity, limit)
    starts, soft_counts, leaf_counts = summary[:, 5], summary[:, 0], summary[:, 1]
    offsets = 2 * np.repeat(soft_counts.cumsum() - soft_counts, soft_counts)
    joined_softs = [_join(array, starts, soft_counts) for array in softs]
    joined_leaves = [_join(array, starts, leaf_counts) for array in leaves]
    if parts > 1:
        leaf_offsets = 2 * np.repeat(soft_counts.cumsum() - soft_counts, leaf_counts)
        joined_softs[2] = np.where(joined_softs[2] < 0, -1, joined_softs[2] + offsets)
        joined_leaves[2] = np.where(joined_leaves[2] < 0, -1, joined_leaves[2] + leaf_offsets)
    visits: list[Any] = [torch.from_numpy(array) for array in (*joined_softs, *joined_leaves)]
    node_sums = torch.from_numpy(sums.sum(0)) if with_sums else None
    visits += [node_sums, int(summary[:, 4].sum()), bool(summary[:, 3].all())]
    return Walk(*visits)


def _read_nodes(parameters: Sequence[Tensor]) -> list[Any]:
    """Weights (m, p) and biases (m,) of all splits and all leaves, as arrays."""
    return parameters_as_arrays(*(tensor.flatten(0, 1) for tensor in parameters))


def _join(array: Any, starts: Any, counts: Any) -> Any:
    """What each part wrote into its region of ``array``."""
    return np.concatenate([array[s : s + c] for s, c in zip(starts, counts, strict=True)])


def visit_trees(
    walk: Walk, x: Tensor, parameters: Sequence[Tensor], gamma: float, sparse: bool = False
) -> tuple[Tensor, Tensor]:
    """α + log v and log v of the leaves that were visited, (L,) each, differentiable.

    Args:
        walk: that of the other arguments.
        x: (B, p).
        parameters: weights and biases of splits and leaves.
        gamma: width of the smooth step.
        sparse: whether the gradients of the two weights are sparse tensors of rows.
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


def softmax_by_row(logits: Tensor, row: Tensor, rows: int) -> Tensor:
    """The softmax over the entries of ``logits`` (L,) with the same row, (L,) int64 below ``rows``."""
    peak = logits.new_full((rows,), -math.inf).scatter_reduce(0, row, logits.detach(), "amax")
    e = (logits - peak[row]).exp()
    return e / e.new_zeros(rows).index_add(0, row, e)[row]


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
        x, *parameters = inputs
        split_weight, _, leaf_weight, _ = _read_nodes(parameters)
        rows, alphas = as_array(x), as_array(grad_logit)
        by_path = as_array(grad_logit + grad_log_path)
        splits = _split_grads(walk, ctx.gamma, by_path)
        grads: list[Tensor | None] = [None] * 5
        if needed[0]:
            by_row = np.zeros_like(rows)
            for node, row, grad, weight in (
                (walk.leaf_node, walk.leaf_row, alphas, leaf_weight),
                (walk.soft_node, walk.soft_row, splits, split_weight),
            ):
                _add_by_target(row, node, grad, weight, by_row)
            grads[0] = torch.from_numpy(by_row)
        for first, node, row, grad in (
            (1, walk.soft_node, walk.soft_row, splits),
            (3, walk.leaf_node, walk.leaf_row, alphas),
        ):
            weight, bias = inputs[first], inputs[first + 1]
            if needed[first]:
                grads[first] = _weight_grad(weight, node, row, grad, rows, ctx.sparse)
            if needed[first + 1]:
                by_node = bias.new_zeros(bias.numel()).index_add_(0, node, torch.from_numpy(grad))
                grads[first + 1] = by_node.view(bias.shape)
        return *grads, None, None, None


def _split_grads(walk: Walk, gamma: float, grad_log_path: Any) -> Any:
    """(S,) gradients of the logits of soft splits, from those of log v of the leaves (L,)."""
    grad = np.empty(len(walk.soft_row), grad_log_path.dtype)
    edges = np.zeros(2 * len(grad), grad.dtype)
    visits = (as_array(part) for part in (walk.soft_share, walk.soft_edge, walk.leaf_edge))
    _climb(gamma, *visits, grad_log_path, edges, grad)
    return grad


def _weight_grad(weight: Tensor, node: Tensor, row: Tensor, grad: Any, rows: Any, sparse: bool) -> Tensor:
    """The gradient of ``weight`` (k, m, p): Σ grad · x over the visits of each node."""
    if not sparse:
        dense = weight.new_zeros(weight.shape)
        _add_by_target(node, row, grad, rows, dense.view(-1, weight.shape[-1]).numpy())
        return dense
    visited, target = node.unique(return_inverse=True)
    values = weight.new_zeros(len(visited), weight.shape[-1])
    _add_by_target(target, row, grad, rows, values.numpy())
    indices = torch.stack((visited // weight.shape[1], visited % weight.shape[1]))
    return torch.sparse_coo_tensor(indices, values, weight.shape, check_invariants=False, is_coalesced=True)


def _add_by_target(target: Tensor, source: Tensor, factor: Any, values: Any, out: Any) -> None:
    """out[target[m]] += factor[m] · values[source[m]] for all m, one thread per target."""
    if not len(target):
        return
    by_target, order = target.sort(stable=True)
    unique, counts = by_target.unique_consecutive(return_counts=True)
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    segments = [as_array(part) for part in (starts, order, unique, source)]
    parts = count_threads(len(unique), len(target) * values.shape[1])
    over_rows(_sum_segments, parts, len(unique), *segments, factor, values, out)


@jit
def _sum_segments(
    part: int,
    first: int,
    last: int,
    starts: Any,
    order: Any,
    target: Any,
    source: Any,
    factor: Any,
    values: Any,
    out: Any,
) -> None:
    for segment in range(first, last):
        to = np.uint64(target[segment])
        for position in range(starts[segment], starts[segment + 1]):
            m = order[position]
            f, of = factor[m], np.uint64(source[m])
            for c in range(np.uint64(values.shape[1])):
                out[to, c] += f * values[of, c]


@jit
def _climb(
    gamma: float, share: Any, edge: Any, leaf_edge: Any, grad_leaf: Any, grad_edge: Any, grad: Any
) -> None:
    """Gradients of soft splits, last visit first: grad_edge collects those of the two sides."""
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


@jit
def _walk(
    part: int,
    first: int,
    last: int,
    x: Any,
    split_weight: Any,
    split_bias: Any,
    leaf_weight: Any,
    leaf_bias: Any,
    k: int,
    gamma: float,
    is_row: Any,
    capacity: int,
    limit: int,
    soft_row: Any,
    soft_node: Any,
    soft_edge: Any,
    soft_share: Any,
    leaf_row: Any,
    leaf_node: Any,
    leaf_edge: Any,
    leaf_logit: Any,
    leaf_log_path: Any,
    sums: Any,
    summary: Any,
) -> None:
    """Walk rows first..last-1 of x, groups of them one level at a time.

    Visits are written from index first · capacity on. ``summary`` (parts, 6) gets the numbers of soft splits
    and leaves, DONE, FULL or TOO_SOFT, whether all logits are finite, nodes visited, and that index.
    """
    n = len(leaf_bias) // k
    kind = x.dtype.type
    half, scale = kind(0.5), kind(1 / gamma)
    first_deep = _first_deep(n)
    levels = 0  # ceil(log2 n)
    while (1 << levels) < n:
        levels += 1
    chains = GROUP * k
    node, edge, logit = np.empty(chains, np.int64), np.empty(chains, np.int64), np.empty(chains, x.dtype)
    visit, log_v = np.empty(chains, np.int64), np.empty(chains, x.dtype)
    stack_size = (chains + 1) * max(levels, 1)
    stack_node, stack_edge = np.empty(stack_size, np.int64), np.empty(stack_size, np.int64)
    stack_chain, stack_log_v = np.empty(stack_size, np.int64), np.empty(stack_size, x.dtype)
    start = first * capacity
    room = (last - first) * capacity
    softs = leaves = visited = 0
    has_sums = sums.shape[3] > 0
    status, finite = DONE, True
    sample = min(SAMPLE_ROWS, last - first)
    for group in range(first, last, GROUP):
        size = min(GROUP, last - group)
        allowed = limit * max(group + size - first, sample)
        stacked = 0
        for c in range(size * k):
            node[c], edge[c], log_v[c] = 0, -1, 0
        # Each chain to one leaf: at a soft split on the likelier side, the other one goes on the stack.
        for _ in range(levels):
            for c in range(size * k):
                visit[c] = (c % k) * (n - 1) + node[c] if node[c] < n - 1 else -1
            _logits(logit, visit, size * k, k, split_weight, split_bias, x, group)
            for c in range(size * k):
                q, j, b = node[c], c % k, group + c // k
                if q >= n - 1:
                    continue
                visited += 1
                if has_sums and (len(is_row) == 0 or is_row[b]):
                    _add_sums(sums[part], j, q, logit[c], log_v[c])
                u = logit[c] * scale
                node[c] = 2 * q + 1 + (u < 0)
                if not (u >= half or u <= -half):
                    finite &= u == u
                    if softs >= room:
                        status = FULL
                        break
                    log_left, log_right = _log_sides(u)
                    is_right = int(u < 0)
                    _put(soft_row, soft_node, soft_edge, start + softs, b, visit[c], edge[c])
                    soft_share[start + softs] = u
                    stack_node[stacked], stack_chain[stacked] = 2 * q + 2 - is_right, c
                    stack_edge[stacked] = 2 * softs + 1 - is_right
                    stack_log_v[stacked] = log_v[c] + (log_left if is_right else log_right)
                    stacked += 1
                    log_v[c] += log_right if is_right else log_left
                    edge[c] = 2 * softs + is_right
                    softs += 1
            if status != DONE:
                break
        if status == DONE and leaves + size * k > room:
            status = FULL
        if status != DONE:
            break
        for c in range(size * k):
            visit[c] = (c % k) * n + _leaf_at(node[c], n, first_deep)
        _logits(logit, visit, size * k, k, leaf_weight, leaf_bias, x, group)
        for c in range(size * k):
            finite &= abs(logit[c]) < np.inf
            to = start + leaves
            _put(leaf_row, leaf_node, leaf_edge, to, group + c // k, visit[c], edge[c])
            leaf_logit[to], leaf_log_path[to] = logit[c] + log_v[c], log_v[c]
            leaves += 1
        visited += size * k
        while stacked > 0:
            stacked -= 1
            q, e, c, path = (
                stack_node[stacked],
                stack_edge[stacked],
                stack_chain[stacked],
                stack_log_v[stacked],
            )
            j, b = c % k, group + c // k
            while q < n - 1:
                t = _logit(split_weight, split_bias, j * (n - 1) + q, x, b)
                visited += 1
                if has_sums and (len(is_row) == 0 or is_row[b]):
                    _add_sums(sums[part], j, q, t, path)
                u = t * scale
                if u >= half or u <= -half:
                    q = 2 * q + 1 + (u < 0)
                    continue
                finite &= u == u
                if softs >= room:
                    status = FULL
                    break
                log_left, log_right = _log_sides(u)
                _put(soft_row, soft_node, soft_edge, start + softs, b, j * (n - 1) + q, e)
                soft_share[start + softs] = u
                stack_node[stacked], stack_chain[stacked] = 2 * q + 2, c
                stack_edge[stacked], stack_log_v[stacked] = 2 * softs + 1, path + log_right
                stacked += 1
                e, path = 2 * softs, path + log_left
                softs += 1
                q = 2 * q + 1
            if visited > allowed:
                status = TOO_SOFT
            elif leaves >= room:
                status = FULL
            if status != DONE:
                break
            leaf = j * n + _leaf_at(q, n, first_deep)
            alpha = _logit(leaf_weight, leaf_bias, leaf, x, b)
            finite &= abs(alpha) < np.inf
            to = start + leaves
            _put(leaf_row, leaf_node, leaf_edge, to, b, leaf, e)
            leaf_logit[to], leaf_log_path[to] = alpha + path, path
            leaves += 1
            visited += 1
        if status != DONE:
            break
    summary[part, 0], summary[part, 1], summary[part, 2] = softs, leaves, status
    summary[part, 3], summary[part, 4], summary[part, 5] = finite, visited, start


@jit
def _logits(out: Any, node: Any, chains: int, k: int, weights: Any, bias: Any, x: Any, group: int) -> None:
    """out[c] = the logit at node[c] of row group + c // k, for each chain c with a node; two at a time."""
    for c in range(0, chains, 2):
        if c + 1 < chains and node[c] >= 0 and node[c + 1] >= 0:
            dot_one = dot_two = x.dtype.type(0)
            one, row_one = np.uint64(node[c]), np.uint64(group + c // k)
            two, row_two = np.uint64(node[c + 1]), np.uint64(group + (c + 1) // k)
            for feature in range(np.uint64(x.shape[1])):
                dot_one += weights[one, feature] * x[row_one, feature]
                dot_two += weights[two, feature] * x[row_two, feature]
            out[c], out[c + 1] = dot_one + bias[one], dot_two + bias[two]
        else:
            for chain in range(c, min(c + 2, chains)):
                if node[chain] >= 0:
                    out[chain] = _logit(weights, bias, node[chain], x, group + chain // k)


# Indices are unsigned: a signed one might count from the end, which would not vectorise.


@jit
def _logit(weights: Any, bias: Any, node: int, x: Any, row: int) -> Any:
    """The logit of a row of x (·, p) at row ``node`` of weights (·, p)."""
    dot = x.dtype.type(0)
    of, b = np.uint64(node), np.uint64(row)
    for feature in range(np.uint64(x.shape[1])):
        dot += weights[of, feature] * x[b, feature]
    return dot + bias[of]


@jit
def _put(rows: Any, nodes: Any, edges: Any, to: int, row: int, node: int, edge: int) -> None:
    rows[to], nodes[to], edges[to] = row, node, edge


@jit
def _add_sums(sums: Any, tree: int, node: int, logit: Any, log_path: Any) -> None:
    """Add the visit of a split to its sums of r, r sign(d) and r |d|."""
    reached = math.exp(log_path) if log_path < 0 else type(logit)(1)
    sums[0, tree, node] += reached
    sums[1, tree, node] += reached * np.sign(logit)
    sums[2, tree, node] += reached * abs(logit)
