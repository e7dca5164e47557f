"""The compiled walk of samples down the trees of a COMET gate.

Samples go down in small groups, one level at a time: the next nodes of a group do not depend on each other,
so the processor waits for their weights together and not one after the other. Two trees of a sample share
each pass over it. The other sides of soft nodes wait, and are then gone down in the same way, one a sample.
"""

import math
import threading
from functools import partial
from typing import Any

import numpy as np

from comet_moe.kernels.jit import array_at, jit, jit_inline, wide_vectors
from comet_moe.kernels.soft_trees import _first_deep, _leaf_at, _log_sides

GROUP = 8
LEAVES = 128
"""Leaves of a sample that there is room for in a group."""
ALONE = 64
"""Samples that are walked one by one, with room for all leaves, once there was too little."""

_of_this_thread = threading.local()


def scratch(k: int, n: int, dtype: Any) -> Any:
    """Room for :func:`walk` to work in, whole numbers and real ones; a thread keeps what it had last."""
    kept = getattr(_of_this_thread, "scratch", None)
    if kept is not None and kept[0] == (k, n, dtype):
        return kept[1]
    chains, waiting = GROUP * k, GROUP * _most_waiting(k, (n - 1).bit_length())
    leaves = max(k * n, GROUP * LEAVES)
    whole = np.empty(chains + 5 * GROUP + 2 * waiting + leaves, np.int64)
    real = np.empty(2 * chains + GROUP + waiting + n + leaves, dtype)
    _of_this_thread.scratch = ((k, n, dtype), (whole, real))
    return whole, real


def _most_waiting(k: int, levels: int) -> int:
    """Nodes of a sample that may wait: one a level of each tree, and of the tree that is being finished."""
    return k * levels + levels


_most_waiting_inlined = jit_inline(_most_waiting)


@partial(jit, allocates=False)
def walk(
    first: int,
    last: int,
    rows: int,
    x_at: int,
    split_weight_at: int,
    split_bias_at: int,
    leaf_weight_at: int,
    leaf_bias_at: int,
    k: int,
    n: int,
    p: int,
    gamma: float,
    out_expert: Any,
    out_weight: Any,
    offsets_at: int,
    chosen_at: int,
    whole: Any,
    real: Any,
) -> Any:
    """Walk rows first..last-1 of x, or of those that are chosen.

    Args:
        first, last: rows, or places among the chosen ones.
        rows: of x, in all.
        x_at: address of (rows, p); as the next four, contiguous and of the type of ``out_weight``.
        split_weight_at, split_bias_at: of (k, n-1, p), (k, n-1).
        leaf_weight_at, leaf_bias_at: of (k, n, p), (k, n).
        k, n, p: trees, experts, features.
        gamma: width of the smooth-step.
        out_expert, out_weight: (rows, room); with offsets (1, all pairs). A row that reaches more experts
            than there is room for has minus their number in its first place.
        offsets_at: address of (rows + 1,) where each row's pairs begin, or 0.
        chosen_at: address of the rows to walk, or 0 for all.
        whole, real: from :func:`scratch`.

    Returns:
        The most experts that a row reaches, nodes and leaves visited, whether all logits are finite.
    """
    wide_vectors()
    x = array_at(x_at, (rows * p,), out_weight)
    split_weight = array_at(split_weight_at, (k * (n - 1) * p,), out_weight)
    split_bias = array_at(split_bias_at, (k * (n - 1),), out_weight)
    leaf_weight = array_at(leaf_weight_at, (k * n * p,), out_weight)
    leaf_bias = array_at(leaf_bias_at, (k * n,), out_weight)
    offsets = array_at(offsets_at, (rows + 1,), out_expert)
    chosen = array_at(chosen_at, (last,), out_expert)
    kind = x.dtype.type
    half, scale = kind(0.5), kind(1 / gamma)
    first_deep = _first_deep(n)
    levels = 0
    while (1 << levels) < n:
        levels += 1
    chains, depth = GROUP * k, _most_waiting_inlined(k, levels)
    node = whole[:chains]
    row, pending, leaves, here, here_tree = (
        whole[chains : chains + GROUP],
        whole[chains + GROUP : chains + 2 * GROUP],
        whole[chains + 2 * GROUP : chains + 3 * GROUP],
        whole[chains + 3 * GROUP : chains + 4 * GROUP],
        whole[chains + 4 * GROUP : chains + 5 * GROUP],
    )
    at, size = chains + 5 * GROUP, GROUP * depth
    pending_node, pending_tree = whole[at : at + size], whole[at + size : at + 2 * size]
    leaf_expert = whole[at + 2 * size :]
    log_v, logit = real[:chains], real[chains : 2 * chains]
    here_log_v = real[2 * chains : 2 * chains + GROUP]
    at = 2 * chains + GROUP
    pending_log_v, mass, leaf_logit = (
        real[at : at + size],
        real[at + size : at + size + n],
        real[at + size + n :],
    )
    for i in range(n):
        mass[i] = 0
    most = 0
    visited = 0
    finite = True
    group = alone_up_to = first
    while group < last:
        size = 1 if group < alone_up_to else min(GROUP, last - group)
        room_for_leaves = k * n if size == 1 else LEAVES
        seen = 0
        overflows = k > room_for_leaves
        for g in range(size):
            row[g] = chosen[group + g] if chosen_at else group + g
            pending[g] = 0
        for c in range(size * k):
            node[c], log_v[c] = 0, 0
        for _ in range(levels):
            for g in range(size):
                _logits(logit, node, g * k, k, split_weight, split_bias, n - 1, x, row[g], p)
                for j in range(k):
                    c = g * k + j
                    q = node[c]
                    if q < n - 1:
                        u = logit[c] * scale
                        seen += 1
                        node[c] = 2 * q + 1 + (u < 0)
                        if not (u >= half or u <= -half):
                            finite &= u == u
                            log_left, log_right = _log_sides(u)
                            taken, other = (log_right, log_left) if u < 0 else (log_left, log_right)
                            place = pending[g]
                            pending_node[g * depth + place] = 2 * q + 2 - (u < 0)
                            pending_tree[g * depth + place] = j
                            pending_log_v[g * depth + place] = log_v[c] + other
                            pending[g] = place + 1
                            log_v[c] += taken
        for c in range(size * k):
            node[c] = _leaf_at(node[c], n, first_deep)
        for g in range(size):
            _logits(logit, node, g * k, k, leaf_weight, leaf_bias, n, x, row[g], p)
        seen += size * k
        for g in range(size):
            here[g], leaves[g] = -1, k
            for j in range(k if not overflows else 0):
                leaf_expert[g * room_for_leaves + j] = node[g * k + j]
                leaf_logit[g * room_for_leaves + j] = logit[g * k + j] + log_v[g * k + j]
        busy = not overflows
        while busy:
            busy = False
            for g in range(size):
                if here[g] < 0:
                    if pending[g] == 0:
                        continue
                    pending[g] -= 1
                    place = g * depth + pending[g]
                    here[g], here_tree[g] = pending_node[place], pending_tree[place]
                    here_log_v[g] = pending_log_v[place]
                busy = True
                q, j, b = here[g], here_tree[g], row[g]
                seen += 1
                if q < n - 1:
                    u = _logit(split_weight, split_bias, j * (n - 1) + q, x, b, p) * scale
                    here[g] = 2 * q + 1 + (u < 0)
                    if not (u >= half or u <= -half):
                        finite &= u == u
                        log_left, log_right = _log_sides(u)
                        place = g * depth + pending[g]
                        pending_node[place], pending_tree[place] = 2 * q + 2, j
                        pending_log_v[place] = here_log_v[g] + log_right
                        pending[g] += 1
                        here[g] = 2 * q + 1
                        here_log_v[g] += log_left
                elif leaves[g] < room_for_leaves:
                    i = _leaf_at(q, n, first_deep)
                    place = g * room_for_leaves + leaves[g]
                    leaf_expert[place] = i
                    leaf_logit[place] = _logit(leaf_weight, leaf_bias, j * n + i, x, b, p) + here_log_v[g]
                    leaves[g] += 1
                    here[g] = -1
                else:
                    overflows = True
            busy &= not overflows
        if overflows:
            alone_up_to = group + ALONE
            continue
        visited += seen
        for g in range(size):
            b = row[g]
            at = g * room_for_leaves
            peak = kind(-np.inf)
            for m in range(at, at + leaves[g]):
                peak = max(peak, leaf_logit[m])
                finite &= abs(leaf_logit[m]) < np.inf
            total = kind(0)
            experts = 0
            for m in range(at, at + leaves[g]):
                e = math.exp(leaf_logit[m] - peak)
                i = leaf_expert[m]
                if e > 0:
                    if mass[i] == 0:
                        leaf_expert[at + experts] = i
                        experts += 1
                    mass[i] += e
                    total += e
            out_row = 0 if offsets_at else b
            offset = offsets[b] if offsets_at else 0
            room = offsets[b + 1] - offset if offsets_at else out_expert.shape[1]
            for m in range(experts):
                i = leaf_expert[at + m]
                if m < room:
                    out_expert[out_row, offset + m], out_weight[out_row, offset + m] = i, mass[i] / total
                mass[i] = 0
            if experts > room and not offsets_at:
                out_expert[b, 0] = -experts
            most = max(most, experts)
        group += size
    return most, visited, finite


@jit_inline
def _logits(
    out: Any, node: Any, chain: int, k: int, weights: Any, bias: Any, width: int, x: Any, b: int, p: int
) -> None:
    """out[chain + j] = the logit of row b at node[chain + j] of tree j, where that is below ``width``."""
    waiting = -1  # a tree without a partner yet
    for j in range(k):
        if node[chain + j] >= width:
            continue
        if waiting < 0:
            waiting = j
            continue
        one, two = waiting * width + node[chain + waiting], j * width + node[chain + j]
        dot_one, dot_two = _two_dots(weights, one, two, x, b, p)
        out[chain + waiting], out[chain + j] = dot_one + bias[one], dot_two + bias[two]
        waiting = -1
    if waiting >= 0:
        out[chain + waiting] = _logit(weights, bias, waiting * width + node[chain + waiting], x, b, p)


@jit_inline
def _logit(weights: Any, bias: Any, node: int, x: Any, b: int, p: int) -> Any:
    """Of row b of x (·, p) at one node, all flat."""
    dot = x.dtype.type(0)
    weights_at, x_at = node * p, b * p
    for c in range(p):
        dot += weights[np.uint64(weights_at + c)] * x[np.uint64(x_at + c)]
    return dot + bias[node]


@jit_inline
def _two_dots(weights: Any, one: int, two: int, x: Any, b: int, p: int) -> Any:
    """Of rows ``one`` and ``two`` of ``weights`` (·, p) with row b of x (·, p), all flat."""
    dot_one = dot_two = x.dtype.type(0)
    one_at, two_at, x_at = one * p, two * p, b * p
    for c in range(p):  # unsigned: a signed index might count from the end, which would not vectorise
        value = x[np.uint64(x_at + c)]
        dot_one += weights[np.uint64(one_at + c)] * value
        dot_two += weights[np.uint64(two_at + c)] * value
    return dot_one, dot_two
