"""The compiled walk of samples down the trees of a COMET gate.

Samples walk in small groups, one level at a time: the next nodes of a group do not depend on each other, so
the processor loads their weights at the same time. Two trees of a sample share each pass over its features.
The other sides of soft nodes are put on a stack per sample and walked afterwards.
"""

import math
from functools import partial
from typing import Any

import numpy as np

from comet_moe.kernels.jit import jit, jit_inline, wide_vectors
from comet_moe.kernels.soft_trees import _first_deep, _leaf_at, _log_sides
from comet_moe.kernels.team import run_in_team

GROUP = 8
"""Samples that walk together."""
GROUP_LEAVES = 128
"""Leaves of one sample that a group can store; a group with more of them walks one by one."""
SINGLE_ROWS = 64
"""Samples that walk one by one, with capacity for all leaves, after a group exceeded ``GROUP_LEAVES``."""


@jit
def walk(
    part: int,
    first: int,
    last: int,
    x: Any,
    split_weight: Any,
    split_bias: Any,
    leaf_weight: Any,
    leaf_bias: Any,
    gamma: float,
    out_expert: Any,
    out_weight: Any,
    offsets: Any,
    chosen: Any,
    summary: Any,
) -> None:
    """Walk rows first..last-1 of x, or rows chosen[first..last-1].

    Nothing is checked here: :mod:`comet_moe.kernels.descent` makes sure that all sizes agree.

    Args:
        part: row of ``summary`` to write.
        first, last: rows of x, or indices into ``chosen``.
        x: (rows, p); as the next four, contiguous and of one floating-point type.
        split_weight, split_bias: (k, n-1, p), (k, n-1).
        leaf_weight, leaf_bias: (k, n, p), (k, n).
        gamma: width of the smooth-step.
        out_expert, out_weight: (rows, capacity), zeros at the start; with offsets (1, all pairs). A row that
            reaches more experts than its capacity gets minus their number in its first slot.
        offsets: (rows + 1,) where the pairs of each row begin, or empty.
        chosen: rows to walk, or empty for all of them.
        summary: (parts, 3): the largest number of experts of a row, the number of nodes and leaves visited,
            and 1 if all logits are finite, else 0.
    """
    k, n, _ = leaf_weight.shape
    levels = _levels(n)
    chains, stacks = GROUP * k, GROUP * _stack_size(k, levels)
    leaves = max(k * n, GROUP * GROUP_LEAVES)
    most_experts, visited, finite = _walk(
        first,
        last,
        x.reshape(x.size),
        split_weight.reshape(split_weight.size),
        split_bias.reshape(split_bias.size),
        leaf_weight.reshape(leaf_weight.size),
        leaf_bias.reshape(leaf_bias.size),
        leaf_weight.shape,
        gamma,
        out_expert,
        out_weight,
        offsets,
        chosen,
        np.empty(chains + 5 * GROUP + 2 * stacks + leaves, np.int64),
        np.empty(2 * chains + GROUP + stacks + n + leaves, x.dtype),
    )
    summary[part, 0], summary[part, 1], summary[part, 2] = most_experts, visited, finite


@jit
def walk_in_team(team: Any, parts: int, rows: int, *arguments: Any) -> bool:
    """:func:`walk` in the threads of ``team``."""
    return run_in_team(walk, team, parts, rows, arguments)


@jit_inline
def _levels(n: int) -> int:
    """ceil(log2 n): the splits on the longest path from the root."""
    levels = 0
    while (1 << levels) < n:
        levels += 1
    return levels


@jit_inline
def _stack_size(k: int, levels: int) -> int:
    """Nodes of a sample on its stack at most: one per level of each tree and of the tree walked last."""
    return k * levels + levels


@partial(jit, allocates=False)
def _walk(
    first: int,
    last: int,
    x: Any,
    split_weight: Any,
    split_bias: Any,
    leaf_weight: Any,
    leaf_bias: Any,
    shape: tuple[int, int, int],
    gamma: float,
    out_expert: Any,
    out_weight: Any,
    offsets: Any,
    chosen: Any,
    int_scratch: Any,
    float_scratch: Any,
) -> Any:
    """:func:`walk` over flat x and parameters, with (k, n, p) as ``shape`` and memory to work in."""
    wide_vectors()
    k, n, p = shape
    kind = x.dtype.type
    half, scale = kind(0.5), kind(1 / gamma)
    first_deep = _first_deep(n)
    levels = _levels(n)
    chains, depth = GROUP * k, _stack_size(k, levels)
    node = int_scratch[:chains]
    row, stacked, leaves, current, current_tree = (
        int_scratch[chains : chains + GROUP],
        int_scratch[chains + GROUP : chains + 2 * GROUP],
        int_scratch[chains + 2 * GROUP : chains + 3 * GROUP],
        int_scratch[chains + 3 * GROUP : chains + 4 * GROUP],
        int_scratch[chains + 4 * GROUP : chains + 5 * GROUP],
    )
    start, size = chains + 5 * GROUP, GROUP * depth
    stack_node, stack_tree = int_scratch[start : start + size], int_scratch[start + size : start + 2 * size]
    leaf_expert = int_scratch[start + 2 * size :]
    log_v, logit = float_scratch[:chains], float_scratch[chains : 2 * chains]
    current_log_v = float_scratch[2 * chains : 2 * chains + GROUP]
    start = 2 * chains + GROUP
    stack_log_v, mass, leaf_logit = (
        float_scratch[start : start + size],
        float_scratch[start + size : start + size + n],
        float_scratch[start + size + n :],
    )
    for i in range(n):
        mass[i] = 0
    most_experts = 0
    visited = 0
    finite = True
    group = single_until = first
    while group < last:
        size = 1 if group < single_until else min(GROUP, last - group)
        leaf_capacity = k * n if size == 1 else GROUP_LEAVES
        visits = 0
        overflows = k > leaf_capacity
        for g in range(size):
            row[g] = chosen[group + g] if len(chosen) else group + g
            stacked[g] = 0
        for c in range(size * k):
            node[c], log_v[c] = 0, 0
        # All trees to one leaf each: at a soft node on the likelier side, the other one goes on the stack.
        for _ in range(levels):
            for g in range(size):
                _logits(logit, node, g * k, k, split_weight, split_bias, n - 1, x, row[g], p)
                for j in range(k):
                    c = g * k + j
                    q = node[c]
                    if q < n - 1:
                        u = logit[c] * scale
                        visits += 1
                        node[c] = 2 * q + 1 + (u < 0)
                        if not (u >= half or u <= -half):
                            finite &= u == u
                            log_left, log_right = _log_sides(u)
                            taken, other = (log_right, log_left) if u < 0 else (log_left, log_right)
                            top = g * depth + stacked[g]
                            stack_node[top] = 2 * q + 2 - (u < 0)
                            stack_tree[top] = j
                            stack_log_v[top] = log_v[c] + other
                            stacked[g] += 1
                            log_v[c] += taken
        for c in range(size * k):
            node[c] = _leaf_at(node[c], n, first_deep)
        for g in range(size):
            _logits(logit, node, g * k, k, leaf_weight, leaf_bias, n, x, row[g], p)
        visits += size * k
        for g in range(size):
            current[g], leaves[g] = -1, k
            for j in range(k if not overflows else 0):
                leaf_expert[g * leaf_capacity + j] = node[g * k + j]
                leaf_logit[g * leaf_capacity + j] = logit[g * k + j] + log_v[g * k + j]
        # The stacks, one node per sample and round.
        is_busy = not overflows
        while is_busy:
            is_busy = False
            for g in range(size):
                if current[g] < 0:
                    if stacked[g] == 0:
                        continue
                    stacked[g] -= 1
                    top = g * depth + stacked[g]
                    current[g], current_tree[g] = stack_node[top], stack_tree[top]
                    current_log_v[g] = stack_log_v[top]
                is_busy = True
                q, j, b = current[g], current_tree[g], row[g]
                visits += 1
                if q < n - 1:
                    u = _logit(split_weight, split_bias, j * (n - 1) + q, x, b, p) * scale
                    current[g] = 2 * q + 1 + (u < 0)
                    if not (u >= half or u <= -half):
                        finite &= u == u
                        log_left, log_right = _log_sides(u)
                        top = g * depth + stacked[g]
                        stack_node[top], stack_tree[top] = 2 * q + 2, j
                        stack_log_v[top] = current_log_v[g] + log_right
                        stacked[g] += 1
                        current[g] = 2 * q + 1
                        current_log_v[g] += log_left
                elif leaves[g] < leaf_capacity:
                    i = _leaf_at(q, n, first_deep)
                    leaf = g * leaf_capacity + leaves[g]
                    leaf_expert[leaf] = i
                    leaf_logit[leaf] = _logit(leaf_weight, leaf_bias, j * n + i, x, b, p) + current_log_v[g]
                    leaves[g] += 1
                    current[g] = -1
                else:
                    overflows = True
            is_busy &= not overflows
        if overflows:
            single_until = group + SINGLE_ROWS
            continue
        visited += visits
        # The softmax over the leaves of all trees, summed by expert.
        for g in range(size):
            b = row[g]
            first_leaf = g * leaf_capacity
            peak = kind(-np.inf)
            for leaf in range(first_leaf, first_leaf + leaves[g]):
                peak = max(peak, leaf_logit[leaf])
                finite &= abs(leaf_logit[leaf]) < np.inf
            total = kind(0)
            experts = 0
            for leaf in range(first_leaf, first_leaf + leaves[g]):
                e = math.exp(leaf_logit[leaf] - peak)
                i = leaf_expert[leaf]
                if e > 0:
                    if mass[i] == 0:
                        leaf_expert[first_leaf + experts] = i
                        experts += 1
                    mass[i] += e
                    total += e
            out_row, offset, capacity = b, 0, out_expert.shape[1]
            if len(offsets):
                out_row, offset, capacity = 0, offsets[b], offsets[b + 1] - offsets[b]
            for slot in range(experts):
                i = leaf_expert[first_leaf + slot]
                if slot < capacity:
                    out_expert[out_row, offset + slot] = i
                    out_weight[out_row, offset + slot] = mass[i] / total
                mass[i] = 0
            if experts > capacity and len(offsets) == 0:
                out_expert[b, 0] = -experts
            most_experts = max(most_experts, experts)
        group += size
    return most_experts, visited, finite


@jit_inline
def _logits(
    out: Any, node: Any, chain: int, k: int, weights: Any, bias: Any, width: int, x: Any, b: int, p: int
) -> None:
    """out[chain + j] = the logit of row b at node[chain + j] of tree j, where that is below ``width``."""
    unpaired = -1  # a tree without a partner yet
    for j in range(k):
        if node[chain + j] >= width:
            continue
        if unpaired < 0:
            unpaired = j
            continue
        one, two = unpaired * width + node[chain + unpaired], j * width + node[chain + j]
        dot_one, dot_two = _two_dots(weights, one, two, x, b, p)
        out[chain + unpaired], out[chain + j] = dot_one + bias[one], dot_two + bias[two]
        unpaired = -1
    if unpaired >= 0:
        out[chain + unpaired] = _logit(weights, bias, unpaired * width + node[chain + unpaired], x, b, p)


@jit_inline
def _logit(weights: Any, bias: Any, node: int, x: Any, b: int, p: int) -> Any:
    """The logit of row b of x (·, p) at one node; all arrays are flat."""
    dot = x.dtype.type(0)
    weights_start, x_start = node * p, b * p
    for c in range(p):
        dot += weights[np.uint64(weights_start + c)] * x[np.uint64(x_start + c)]
    return dot + bias[node]


@jit_inline
def _two_dots(weights: Any, one: int, two: int, x: Any, b: int, p: int) -> Any:
    """The products of rows ``one`` and ``two`` of weights (·, p) with row b of x (·, p); all are flat."""
    dot_one = dot_two = x.dtype.type(0)
    one_start, two_start, x_start = one * p, two * p, b * p
    for c in range(p):  # unsigned: a signed index might count from the end, which would not vectorise
        value = x[np.uint64(x_start + c)]
        dot_one += weights[np.uint64(one_start + c)] * value
        dot_two += weights[np.uint64(two_start + c)] * value
    return dot_one, dot_two
