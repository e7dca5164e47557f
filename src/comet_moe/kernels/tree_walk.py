"""The visits of a training batch to the nodes of COMET's trees: each row walks down each tree.

At a soft split a row takes both sides. Shapes: B rows, p features, k trees with n leaves, S visits of soft
splits, L visits of leaves. An edge is 2 s for the left side and 2 s + 1 for the right side of the visit s of
a soft split. It names the nearest soft split above a visit, and is -1 where there is none.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from comet_moe.kernels.jit import jit
from comet_moe.kernels.likeliest_paths import walk_likeliest
from comet_moe.kernels.members import in_order
from comet_moe.kernels.nodes import (
    DONE,
    FULL,
    GROUP,
    TOO_SOFT,
    add_sums,
    first_deep_node,
    leaf_at,
    log_sides,
    node_logit,
    node_logits,
    put,
)
from comet_moe.kernels.threads import count_threads, over_rows

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
        cut: number of (row, tree) pairs that had more paths than ``max_paths``.
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
    cut: int


def most_visits(rows: int, k: int, n: int) -> int:
    """Nodes and leaves that a row may visit on average; beyond it all nodes are evaluated."""
    share = min(int(WALK_SHARE * k * (2 * n - 1)), MOST_VISITS // max(rows, 1))
    return max(2 * k * n.bit_length(), share)


def walk_trees(
    x: Tensor,
    parameters: Sequence[Tensor],
    gamma: float,
    mask: Tensor | None,
    with_sums: bool,
    max_paths: int | None = None,
) -> Walk | None:
    """Walk ``x`` (B, p) down the trees; None if rows visit too many nodes to gain by it.

    Args:
        x: on the CPU, of the type of the parameters.
        parameters: weights and biases of splits and leaves: (k, n-1, p), (k, n-1), (k, n, p), (k, n).
        gamma: width of the smooth step.
        mask: (B,) bool, False for rows that do not count in ``sums``; None if all do.
        with_sums: whether to compute ``sums``.
        max_paths: nodes of a row and tree at each level, see :mod:`comet_moe.kernels.likeliest_paths`. With
            it, no number of nodes is too many.
    """
    flat = [in_order(tensor.detach()).view(-1) for tensor in (x, *parameters)]
    rows = x.detach()
    k, n, p = parameters[2].shape
    loop, limit = _walk, most_visits(len(rows), k, n)  # visits of a row on average
    bound = limit
    if max_paths is not None:
        loop, limit = walk_likeliest, min(max_paths, n)
        bound = k * limit * n.bit_length()  # visits of a row at most
    is_row = torch.empty(0, dtype=torch.bool) if mask is None else in_order(mask)
    parts = count_threads(len(rows), len(rows) * k * n.bit_length() * p)
    capacity = min(FIRST_SLOTS * k, bound)
    while True:
        indices = [torch.empty(len(rows) * capacity, dtype=torch.int64) for _ in range(6)]
        values = [rows.new_empty(len(rows) * capacity) for _ in range(3)]
        sums = rows.new_zeros(parts, 3, k, n - 1 if with_sums else 0)
        summary = torch.zeros(parts, 7, dtype=torch.int64)
        given = (*flat, k, p, float(gamma), is_row, capacity, limit)
        over_rows(loop, parts, len(rows), *given, *indices, *values, sums, summary)
        softs, leaves, ends, finite, visited, starts, cut = summary.T.tolist()
        if all(end == DONE for end in ends):
            break
        if TOO_SOFT in ends or capacity == bound:
            return None
        capacity = min(8 * capacity, bound)
    joined = [
        torch.cat([array[start : start + count] for start, count in zip(starts, counts, strict=True)])
        for counts, arrays in ((softs, (*indices[:3], values[0])), (leaves, (*indices[3:], *values[1:])))
        for array in arrays
    ]
    if parts > 1:  # edges count the visits of their part
        before = 2 * (torch.tensor(softs).cumsum(0) - torch.tensor(softs))
        for position, counts in ((2, softs), (6, leaves)):
            edge, offset = joined[position], before.repeat_interleave(torch.tensor(counts))
            joined[position] = torch.where(edge < 0, -1, edge + offset)
    visits: list[Any] = [*joined, sums.sum(0) if with_sums else None, sum(visited), all(finite), sum(cut)]
    return Walk(*visits)


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
    p: int,
    gamma: float,
    is_row: Any,
    capacity: int,
    limit: int,
    soft_row: Any,
    soft_node: Any,
    soft_edge: Any,
    leaf_row: Any,
    leaf_node: Any,
    leaf_edge: Any,
    soft_share: Any,
    leaf_logit: Any,
    leaf_log_path: Any,
    sums: Any,
    summary: Any,
) -> None:
    """Walk rows first..last-1 of x, groups of them one level at a time.

    Visits are written from index first · capacity on. ``summary`` (parts, 7) gets the numbers of soft splits
    and leaves, DONE, FULL or TOO_SOFT, whether all logits are finite, nodes visited, and that index. The last
    number, of trees that were cut, stays 0.
    """
    n = len(leaf_bias) // k
    kind = x.dtype.type
    half, scale = kind(0.5), kind(1 / gamma)
    first_deep = first_deep_node(n)
    levels = 0  # ceil(log2 n)
    while (1 << levels) < n:
        levels += 1
    chains = GROUP * k
    node, edge, logit = np.empty(chains, np.int64), np.empty(chains, np.int64), np.empty(chains, x.dtype)
    log_v = np.empty(chains, x.dtype)
    stack_size = (chains + 1) * max(levels, 1)
    stack_node, stack_edge = np.empty(stack_size, np.int64), np.empty(stack_size, np.int64)
    stack_chain, stack_log_v = np.empty(stack_size, np.int64), np.empty(stack_size, x.dtype)
    start = first * capacity
    part_capacity = (last - first) * capacity
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
            for g in range(size):
                node_logits(logit, node, g * k, k, split_weight, split_bias, n - 1, x, group + g, p)
            for c in range(size * k):
                q, j, b = node[c], c % k, group + c // k
                if q >= n - 1:
                    continue
                visited += 1
                if has_sums and (len(is_row) == 0 or is_row[b]):
                    add_sums(sums[part], j, q, logit[c], log_v[c])
                u = logit[c] * scale
                node[c] = 2 * q + 1 + (u < 0)
                if not (u >= half or u <= -half):
                    finite &= u == u
                    if softs >= part_capacity:
                        status = FULL
                        break
                    log_left, log_right = log_sides(u)
                    is_right = int(u < 0)
                    put(soft_row, soft_node, soft_edge, start + softs, b, j * (n - 1) + q, edge[c])
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
        if status == DONE and leaves + size * k > part_capacity:
            status = FULL
        if status != DONE:
            break
        for c in range(size * k):
            node[c] = leaf_at(node[c], n, first_deep)
        for g in range(size):
            node_logits(logit, node, g * k, k, leaf_weight, leaf_bias, n, x, group + g, p)
        for c in range(size * k):
            finite &= abs(logit[c]) < np.inf
            to = start + leaves
            put(leaf_row, leaf_node, leaf_edge, to, group + c // k, (c % k) * n + node[c], edge[c])
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
                t = node_logit(split_weight, split_bias, j * (n - 1) + q, x, b, p)
                visited += 1
                if has_sums and (len(is_row) == 0 or is_row[b]):
                    add_sums(sums[part], j, q, t, path)
                u = t * scale
                if u >= half or u <= -half:
                    q = 2 * q + 1 + (u < 0)
                    continue
                finite &= u == u
                if softs >= part_capacity:
                    status = FULL
                    break
                log_left, log_right = log_sides(u)
                put(soft_row, soft_node, soft_edge, start + softs, b, j * (n - 1) + q, e)
                soft_share[start + softs] = u
                stack_node[stacked], stack_chain[stacked] = 2 * q + 2, c
                stack_edge[stacked], stack_log_v[stacked] = 2 * softs + 1, path + log_right
                stacked += 1
                e, path = 2 * softs, path + log_left
                softs += 1
                q = 2 * q + 1
            if visited > allowed:
                status = TOO_SOFT
            elif leaves >= part_capacity:
                status = FULL
            if status != DONE:
                break
            leaf = j * n + leaf_at(q, n, first_deep)
            alpha = node_logit(leaf_weight, leaf_bias, leaf, x, b, p)
            finite &= abs(alpha) < np.inf
            to = start + leaves
            put(leaf_row, leaf_node, leaf_edge, to, b, leaf, e)
            leaf_logit[to], leaf_log_path[to] = alpha + path, path
            leaves += 1
            visited += 1
        if status != DONE:
            break
    summary[part, 0], summary[part, 1], summary[part, 2] = softs, leaves, status
    summary[part, 3], summary[part, 4], summary[part, 5] = finite, visited, start
