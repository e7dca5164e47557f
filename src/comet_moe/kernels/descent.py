"""Inference of a COMET gate: each sample walks down each tree, and only the nodes it meets are evaluated.

At a node inside (-γ/2, γ/2) both sides are followed, so the answer is that of the dense gate. The cost is
O(k p log n) a sample where paths are hard; nothing of size (B, n) is formed.

Samples go down in small groups, one level at a time: the next nodes of a group do not depend on each other,
so the processor waits for their weights together and not one after the other.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from comet_moe.kernels.compiling import array_at, compiled
from comet_moe.kernels.threads import WORTH_A_THREAD, over_rows
from comet_moe.kernels.trees import _first_deep, _leaf_at

ROOM = 8
"""Experts a tree that a sample has room for at first; a sample with more of them is walked a second time."""
GROUP = 8
_NONE = np.empty(0, np.int64)


Arrays = tuple[Any, Any, Any, Any]
"""split_weight (k, n-1, p), split_bias (k, n-1), leaf_weight (k, n, p), leaf_bias (k, n)."""


class Reached(NamedTuple):
    """The experts that samples reach, in ``room`` places each; unused places have weight 0.

    Attributes:
        expert: (B, room) int64.
        weight: (B, room).
        count: (B,) int64, experts of each sample; above ``room`` where they do not fit.
        most: the largest count.
        visited: nodes and leaves that were evaluated.
        finite: whether all their logits are; if not, the rest means nothing.
    """

    expert: Any
    weight: Any
    count: Any
    most: int
    visited: int
    finite: bool


def descend(x: Tensor, nodes: Arrays, gamma: float) -> Reached:
    """Walk ``x`` (B, p), contiguous and on the CPU, down the trees."""
    rows = x.shape[0]
    k, n = nodes[3].shape
    room = k * min(ROOM, n)
    expert, weight = np.zeros((rows, room), np.int64), np.zeros((rows, room), nodes[3].dtype)
    count = np.empty(rows, np.int64)
    arguments = (rows, x.data_ptr(), *nodes, gamma, _NONE, expert, weight, count, _NONE)
    work = rows * k * n.bit_length() * nodes[2].shape[2]
    if work < WORTH_A_THREAD:  # over_rows would do the same, a microsecond later
        return Reached(expert, weight, count, *_walk(0, rows, *arguments))
    found = over_rows(lambda first, last: _walk(first, last, *arguments), rows, work)
    most, visited, finite = zip(*found, strict=True)
    return Reached(expert, weight, count, max(most), sum(visited), all(finite))


def descend_again(x: Tensor, nodes: Arrays, gamma: float, reached: Reached) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs (sample, expert, weight), ordered by sample, where some samples had too little room."""
    expert, weight, count = reached[:3]
    rows, room = expert.shape
    start = np.concatenate(([0], count.cumsum()))
    fits = count <= room
    used = fits[:, None] & (np.arange(room) < count[:, None])
    sample = np.repeat(np.arange(rows), count)
    all_expert, all_weight = np.empty((1, len(sample)), np.int64), np.empty((1, len(sample)), weight.dtype)
    all_expert[0, fits[sample]], all_weight[0, fits[sample]] = expert[used], weight[used]
    chosen = np.flatnonzero(~fits)
    arguments = (rows, x.data_ptr(), *nodes, gamma, start, all_expert, all_weight, count.copy(), chosen)
    work = int(count[chosen].sum()) * x.shape[1]
    over_rows(lambda first, last: _walk(first, last, *arguments), len(chosen), work)
    return torch.from_numpy(sample), torch.from_numpy(all_expert[0]), torch.from_numpy(all_weight[0])


@compiled
def _dot(weights: Any, x: Any) -> Any:
    total = x.dtype.type(0)
    for c in range(x.shape[0]):
        total += weights[c] * x[c]
    return total


@compiled
def _walk(
    first: int,
    last: int,
    rows: int,
    address: int,
    split_weight: Any,
    split_bias: Any,
    leaf_weight: Any,
    leaf_bias: Any,
    gamma: float,
    offsets: Any,
    out_expert: Any,
    out_weight: Any,
    out_count: Any,
    chosen: Any,
) -> Any:
    """Rows first..last-1 of x, of ``chosen`` if it is not empty; with ``offsets`` the output is flat."""
    k, n, p = leaf_weight.shape
    x = array_at(address, (rows, p), leaf_bias)
    kind = x.dtype.type
    half, three, two = kind(0.5), kind(3), kind(2)
    scale = kind(1 / gamma)
    first_deep = _first_deep(n)
    levels = 0
    while (1 << levels) < n:
        levels += 1
    chains = GROUP * k
    depth = k * (levels + 1) + levels + 2
    whole = np.empty((2, chains + GROUP * depth), np.int64)  # few allocations: they are what one row costs
    real = np.empty((2, chains + GROUP * depth), x.dtype)
    node, pending = whole[0, :chains], whole[1, :GROUP]
    log_v, leaf_logit = real[0, :chains], real[1, :chains]
    pending_node = whole[0, chains:].reshape(GROUP, depth)
    pending_tree = whole[1, chains:].reshape(GROUP, depth)
    pending_log_v = real[0, chains:].reshape(GROUP, depth)
    entry_expert = np.empty(k * n, np.int64)
    entry = np.empty(k * n, x.dtype)
    mass = np.zeros(n, x.dtype)
    most = 0
    visited = 0
    finite = True
    for group in range(first, last, GROUP):
        size = min(GROUP, last - group)
        for g in range(size):
            pending[g] = 0
            for j in range(k):
                node[g * k + j], log_v[g * k + j] = 0, 0
        for _ in range(levels):
            for g in range(size):
                b = chosen[group + g] if chosen.size else group + g
                for j in range(k):
                    c = g * k + j
                    q = node[c]
                    if q < n - 1:
                        u = (_dot(split_weight[j, q], x[b]) + split_bias[j, q]) * scale
                        visited += 1
                        node[c] = 2 * q + 1 + (u < 0)
                        if not (u >= half or u <= -half):
                            finite &= u == u
                            left, right = half + u, half - u
                            log_left = math.log(left * left * (three - two * left))
                            log_right = math.log(right * right * (three - two * right))
                            taken, other = (log_right, log_left) if u < 0 else (log_left, log_right)
                            place = pending[g]
                            pending_node[g, place] = 2 * q + 2 - (u < 0)
                            pending_tree[g, place] = j
                            pending_log_v[g, place] = log_v[c] + other
                            pending[g] = place + 1
                            log_v[c] += taken
        for g in range(size):
            b = chosen[group + g] if chosen.size else group + g
            for j in range(k):
                c = g * k + j
                i = _leaf_at(node[c], n, first_deep)
                node[c] = i
                leaf_logit[c] = _dot(leaf_weight[j, i], x[b]) + leaf_bias[j, i] + log_v[c]
                visited += 1
        for g in range(size):
            b = chosen[group + g] if chosen.size else group + g
            entries = k
            peak = leaf_logit[g * k]
            for j in range(k):
                entry_expert[j], entry[j] = node[g * k + j], leaf_logit[g * k + j]
                peak = max(peak, entry[j])
                finite &= abs(entry[j]) < np.inf
            while pending[g] > 0:
                pending[g] -= 1
                place = pending[g]
                q, j, log_p = pending_node[g, place], pending_tree[g, place], pending_log_v[g, place]
                while q < n - 1:
                    u = (_dot(split_weight[j, q], x[b]) + split_bias[j, q]) * scale
                    visited += 1
                    if not (u >= half or u <= -half):
                        finite &= u == u
                        left, right = half + u, half - u
                        place = pending[g]
                        pending_node[g, place] = 2 * q + 2
                        pending_tree[g, place] = j
                        pending_log_v[g, place] = log_p + math.log(right * right * (three - two * right))
                        pending[g] = place + 1
                        log_p += math.log(left * left * (three - two * left))
                        q = 2 * q + 1
                    else:
                        q = 2 * q + 1 + (u < 0)
                i = _leaf_at(q, n, first_deep)
                a = _dot(leaf_weight[j, i], x[b]) + leaf_bias[j, i] + log_p
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
            offset = offsets[b] if offsets.size else 0
            row = 0 if offsets.size else b
            room = experts if offsets.size else out_expert.shape[1]
            for m in range(experts):
                i = entry_expert[m]
                if m < room:
                    out_expert[row, offset + m], out_weight[row, offset + m] = i, mass[i] / total
                mass[i] = 0
            out_count[b] = experts
            most = max(most, experts)
    return most, visited, finite
