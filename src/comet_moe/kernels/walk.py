"""The compiled walk of samples down the trees of a COMET gate.

Samples go down in small groups, one level at a time: the next nodes of a group do not depend on each other,
so the processor waits for their weights together and not one after the other. Two trees of a sample share
each pass over it.
"""

import math
import threading
from functools import partial
from typing import Any

import numpy as np

from comet_moe.kernels.compiling import array_at, compiled, inlined, wide_vectors
from comet_moe.kernels.trees import _first_deep, _leaf_at, _log_sides

GROUP = 8


_of_this_thread = threading.local()


def scratch(k: int, n: int, dtype: Any) -> Any:
    """Room for :func:`walk` to work in, whole numbers and real ones; a thread keeps what it had last."""
    kept = getattr(_of_this_thread, "scratch", None)
    if kept is not None and kept[0] == (k, n, dtype):
        return kept[1]
    chains, waiting = GROUP * k, GROUP * _most_waiting(k, (n - 1).bit_length())
    whole = np.empty(chains + 2 * GROUP + 2 * waiting + k * n, np.int64)
    real = np.empty(2 * chains + waiting + (k + 1) * n, dtype)
    _of_this_thread.scratch = ((k, n, dtype), (whole, real))
    return whole, real


def _most_waiting(k: int, levels: int) -> int:
    """Nodes of a sample that may wait: one a level of each tree, and of the tree that is being finished."""
    return k * levels + levels


_most_waiting_inlined = inlined(_most_waiting)


@partial(compiled, allocates=False)
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
    node, row = whole[:chains], whole[chains : chains + GROUP]
    pending = whole[chains + GROUP : chains + 2 * GROUP]
    at, size = chains + 2 * GROUP, GROUP * depth
    pending_node, pending_tree = whole[at : at + size], whole[at + size : at + 2 * size]
    entry_expert = whole[at + 2 * size :]
    log_v, logit, pending_log_v = (
        real[:chains],
        real[chains : 2 * chains],
        real[2 * chains : 2 * chains + size],
    )
    at = 2 * chains + size
    mass, entry = real[at : at + n], real[at + n :]
    for i in range(n):
        mass[i] = 0
    most = 0
    visited = 0
    finite = True
    for group in range(first, last, GROUP):
        size = min(GROUP, last - group)
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
                        visited += 1
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
        visited += size * k
        for g in range(size):
            b = row[g]
            entries = k
            peak = kind(-np.inf)
            for j in range(k):
                entry_expert[j], entry[j] = node[g * k + j], logit[g * k + j] + log_v[g * k + j]
                peak = max(peak, entry[j])
                finite &= abs(entry[j]) < np.inf
            while pending[g] > 0:
                pending[g] -= 1
                place = pending[g]
                q, j, log_p = (
                    pending_node[g * depth + place],
                    pending_tree[g * depth + place],
                    pending_log_v[g * depth + place],
                )
                while q < n - 1:
                    u = _logit(split_weight, split_bias, j * (n - 1) + q, x, b, p) * scale
                    visited += 1
                    if not (u >= half or u <= -half):
                        finite &= u == u
                        log_left, log_right = _log_sides(u)
                        place = pending[g]
                        pending_node[g * depth + place] = 2 * q + 2
                        pending_tree[g * depth + place] = j
                        pending_log_v[g * depth + place] = log_p + log_right
                        pending[g] = place + 1
                        log_p += log_left
                        q = 2 * q + 1
                    else:
                        q = 2 * q + 1 + (u < 0)
                i = _leaf_at(q, n, first_deep)
                a = _logit(leaf_weight, leaf_bias, j * n + i, x, b, p) + log_p
                visited += 1
                entry_expert[entries], entry[entries] = i, a
                peak = max(peak, a)
                finite &= abs(a) < np.inf
                entries += 1
            total = kind(0)
            experts = 0
            for m in range(entries):
                e = math.exp(entry[m] - peak)
                i = entry_expert[m]
                if e > 0:
                    if mass[i] == 0:
                        entry_expert[experts] = i
                        experts += 1
                    mass[i] += e
                    total += e
            out_row = 0 if offsets_at else b
            offset = offsets[b] if offsets_at else 0
            room = offsets[b + 1] - offset if offsets_at else out_expert.shape[1]
            for m in range(experts):
                i = entry_expert[m]
                if m < room:
                    out_expert[out_row, offset + m], out_weight[out_row, offset + m] = i, mass[i] / total
                mass[i] = 0
            if experts > room and not offsets_at:
                out_expert[b, 0] = -experts
            most = max(most, experts)
    return most, visited, finite


@inlined
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


@inlined
def _logit(weights: Any, bias: Any, node: int, x: Any, b: int, p: int) -> Any:
    return _two_dots(weights, node, node, x, b, p)[0] + bias[node]


@inlined
def _two_dots(weights: Any, one: int, two: int, x: Any, b: int, p: int) -> Any:
    """Of rows ``one`` and ``two`` of ``weights`` (·, p) with row b of x (·, p), all flat."""
    dot_one = dot_two = x.dtype.type(0)
    one_at, two_at, x_at = one * p, two * p, b * p
    for c in range(p):  # unsigned: a signed index might count from the end, which would not vectorise
        value = x[np.uint64(x_at + c)]
        dot_one += weights[np.uint64(one_at + c)] * value
        dot_two += weights[np.uint64(two_at + c)] * value
    return dot_one, dot_two
