"""Inference of a COMET gate: each sample walks down each tree, and only the nodes it meets are evaluated.

At a node inside (-γ/2, γ/2) both sides are followed, so the weights are those of the dense gate. The cost is
O(k p log n) per sample where paths are hard; no tensor of size (B, n) is formed.

Samples walk in small groups, one level at a time. The next nodes of a group do not depend on each other, so
the processor loads their weights at the same time. Two trees of a sample share each pass over its features.
The other sides of soft nodes are put on a stack per sample and walked afterwards.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from comet_moe.kernels.jit import COMPILED_TYPES, jit
from comet_moe.kernels.members import Kind, in_order, word_of
from comet_moe.kernels.nodes import first_deep_node, leaf_at, log_sides, node_logit, node_logits
from comet_moe.kernels.threads import count_threads, run_words

SLOTS_PER_TREE = 8
"""Slots per tree that a sample has at first; one that reaches more experts is walked a second time."""

GROUP = 8
"""Samples that walk together."""
GROUP_LEAVES = 128
"""Leaves of one sample that a group can store; a group with more of them walks one by one."""
FEW_LEAVES = 32
"""Leaves of one sample up to which the leaves of each expert are found by comparing all of them."""
SINGLE_ROWS = 64
"""Samples that walk one by one, with capacity for all leaves, after a group exceeded ``GROUP_LEAVES``."""

MORE_ROWS = 128
"""Rows by which a batch counts as larger: single rows are routed one after the other, many times."""

_NUMPY_TYPES = {torch.float32: np.float32, torch.float64: np.float64}
_INDICES = torch.int64, 0
_KINDS: dict[torch.dtype, tuple[Kind, ...]] = {
    dtype: (
        *5 * ((dtype, 0),),
        *(int, int, int, float),
        *(_INDICES, (dtype, 0), int, _INDICES, _INDICES, bool, _INDICES),
    )
    for dtype in COMPILED_TYPES
}
"""The kinds of the arguments of :func:`_walk`."""


def descent_work(x: Tensor, leaf_bias: Tensor) -> int:
    """Multiply-adds by which the descent of x (..., p) is judged: those of all nodes and leaves (k, n)."""
    return 2 * leaf_bias.numel() * (x.numel() + MORE_ROWS * x.shape[-1])


class Trees(NamedTuple):
    """Parameters of k trees, contiguous and of one type.

    Attributes:
        split_weight, split_bias: (k, n-1, p), (k, n-1).
        leaf_weight, leaf_bias: (k, n, p), (k, n).
    """

    split_weight: Tensor
    split_bias: Tensor
    leaf_weight: Tensor
    leaf_bias: Tensor


def read_trees(parameters: Sequence[Tensor], dtype: torch.dtype) -> Trees:
    """The parameters of a COMET gate in the order of :class:`Trees`, themselves where possible."""
    trees = split_weight, split_bias, leaf_weight, leaf_bias = Trees(
        *[in_order(tensor if tensor.dtype is dtype else tensor.to(dtype)) for tensor in parameters]
    )
    shape = k, n, p = leaf_weight.shape if leaf_weight.dim() == 3 else (0, 0, 0)
    if (
        k < 1
        or n < 1
        or split_weight.shape != (k, n - 1, p)
        or split_bias.shape != (k, n - 1)
        or leaf_bias.shape != shape[:2]
    ):
        raise ValueError(
            "split_weight, split_bias, leaf_weight and leaf_bias must have shapes (k, n-1, p), (k, n-1), "
            f"(k, n, p) and (k, n), got {', '.join(str(tuple(tensor.shape)) for tensor in trees)}"
        )
    return trees


class Descent(NamedTuple):
    """The experts that samples reach, in a number of slots per sample; unused slots have weight 0.

    Attributes:
        expert: (B, slots) int64; for a sample that reaches more experts, the first is minus their number.
        weight: (B, slots).
        most_experts: the most experts that one sample reaches.
        visited: number of nodes and leaves that were evaluated.
        finite: whether all their logits are finite; if not, the weights are undefined.
    """

    expert: Tensor
    weight: Tensor
    most_experts: int
    visited: int
    finite: bool

    @property
    def fits(self) -> bool:
        """Whether every sample has slots for all its experts."""
        return self.most_experts <= self.expert.shape[1]


def descend(x: Tensor, trees: Trees, gamma: float) -> Descent:
    """Walk ``x`` (B, p), on the CPU and of the type of the trees, down the trees."""
    k, n, p = trees.leaf_weight.shape
    x, rows = _read_rows(x, trees), x.shape[0]
    shape = rows, k * min(SLOTS_PER_TREE, n)
    # By numpy, which takes half of the time of torch.empty.
    expert, weight = (torch.from_numpy(np.empty(shape, kind)) for kind in (np.int64, _NUMPY_TYPES[x.dtype]))
    found = _walk_rows(rows, rows * k * n.bit_length() * p, x, trees, gamma, expert, weight)
    return Descent(expert, weight, *found)


def descend_again(x: Tensor, trees: Trees, gamma: float, first: Descent) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs (sample, expert, weight), ordered by sample, after a descent without enough slots."""
    x = _read_rows(x, trees)
    fits = first.expert[:, 0] >= 0
    used = fits.unsqueeze(1) & (first.weight != 0)
    count = torch.where(fits, used.sum(1), -first.expert[:, 0])
    sample = torch.repeat_interleave(torch.arange(len(count)), count)
    expert, weight = first.expert.new_empty(1, len(sample)), first.weight.new_empty(1, len(sample))
    is_known = fits[sample]
    expert[0, is_known], weight[0, is_known] = first.expert[used], first.weight[used]
    chosen = (~fits).nonzero().squeeze(1)
    work = int(count[chosen].sum()) * x.shape[1]
    offsets = F.pad(count.cumsum(0), (1, 0))
    _walk_rows(len(chosen), work, x, trees, gamma, expert, weight, offsets, chosen)
    return sample, expert[0], weight[0]


def _walk_rows(
    rows: int,
    work: int,
    x: Tensor,
    trees: Trees,
    gamma: float,
    expert: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    chosen: Tensor | None = None,
) -> tuple[int, int, bool]:
    """:func:`_walk` in threads: the most experts of a row, nodes visited, whether all logits are finite.

    Arguments go by their addresses: on one row, reading their shapes would take as long as the walk.
    """
    parts = count_threads(rows, work)
    summary = array("q", bytes(24 * parts))
    split_weight, split_bias, leaf_weight, leaf_bias = trees
    words = [
        x.data_ptr(),
        split_weight.data_ptr(),
        split_bias.data_ptr(),
        leaf_weight.data_ptr(),
        leaf_bias.data_ptr(),
        *leaf_weight.shape,
        word_of(gamma),
        expert.data_ptr(),
        weight.data_ptr(),
        expert.shape[1],
        0 if offsets is None else offsets.data_ptr(),
        0 if chosen is None else chosen.data_ptr(),
        chosen is not None,
        summary.buffer_info()[0],
    ]
    run_words(_walk, _KINDS[x.dtype], parts, rows, words)
    if parts == 1:
        return summary[0], summary[1], bool(summary[2])
    return max(summary[::3]), sum(summary[1::3]), all(summary[2::3])


def _read_rows(x: Tensor, trees: Trees) -> Tensor:
    """``x`` (B, p), contiguous."""
    p, dtype = trees.leaf_weight.shape[2], trees.leaf_weight.dtype
    if x.dim() != 2 or x.shape[1] != p or x.dtype is not dtype:
        raise ValueError(f"x must have shape (B, {p}) and dtype {dtype}, got {tuple(x.shape)} and {x.dtype}")
    return in_order(x)


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
    n: int,
    p: int,
    gamma: float,
    out_expert: Any,
    out_weight: Any,
    slots: int,
    offsets: Any,
    chosen: Any,
    has_offsets: bool,
    summary: Any,
) -> None:
    """Walk rows first..last-1 of x, or rows chosen[first..last-1].

    Nothing is checked here: callers make sure that all sizes agree.

    Args:
        part: row of ``summary`` to write.
        first, last: rows of x, or indices into ``chosen``.
        x: (rows, p); as all arrays here, flat.
        split_weight, split_bias: (k, n-1, p), (k, n-1).
        leaf_weight, leaf_bias: (k, n, p), (k, n).
        k, n, p: these sizes.
        gamma: width of the smooth-step.
        out_expert, out_weight: (rows, slots), or with offsets (all pairs,). A row that reaches more experts
            than it has slots gets minus their number in its first slot.
        slots: of each row.
        offsets, chosen: (rows + 1,) where the pairs of each row begin, and the rows to walk.
        has_offsets: whether there are these two.
        summary: (parts, 3): the largest number of experts of a row, the number of nodes and leaves visited,
            and 1 if all logits are finite, else 0.
    """
    dtype = x.dtype
    kind = dtype.type
    half, scale = kind(0.5), kind(1 / gamma)
    first_deep = first_deep_node(n)
    levels = 0  # ceil(log2 n), the splits on the longest path from the root
    while (1 << levels) < n:
        levels += 1
    depth = k * levels + levels  # nodes on a stack at most: of each tree, and of the tree walked last
    chains, stack_size, leaf_count = GROUP * k, GROUP * depth, GROUP * GROUP_LEAVES
    node, log_v, logit = np.empty(chains, np.int64), np.empty(chains, dtype), np.empty(chains, dtype)
    row, stacked, leaves = np.empty(GROUP, np.int64), np.empty(GROUP, np.int64), np.empty(GROUP, np.int64)
    current, current_tree = np.empty(GROUP, np.int64), np.empty(GROUP, np.int64)
    current_log_v = np.empty(GROUP, dtype)
    stack_node, stack_tree = np.empty(stack_size, np.int64), np.empty(stack_size, np.int64)
    stack_log_v = np.empty(stack_size, dtype)
    leaf_expert, leaf_logit = np.empty(leaf_count, np.int64), np.empty(leaf_count, dtype)
    mass = np.empty(0, dtype)  # by expert, once a sample reaches many leaves: it takes as long as n is large
    most_experts = 0
    visited = 0
    finite = True
    group = single_until = first
    while group < last:
        size = 1 if group < single_until else min(GROUP, last - group)
        leaf_capacity = max(k * n, GROUP_LEAVES) if group < single_until else GROUP_LEAVES
        if leaf_capacity > len(leaf_expert):
            leaf_expert, leaf_logit = np.empty(leaf_capacity, np.int64), np.empty(leaf_capacity, dtype)
        visits = 0
        overflows = k > leaf_capacity
        for g in range(size):
            row[g] = chosen[group + g] if has_offsets else group + g
            stacked[g] = 0
        for c in range(size * k):
            node[c], log_v[c] = 0, 0
        # All trees to one leaf each: at a soft node on the likelier side, the other one goes on the stack.
        for _ in range(levels):
            for g in range(size):
                node_logits(logit, node, g * k, k, split_weight, split_bias, n - 1, x, row[g], p)
                for j in range(k):
                    c = g * k + j
                    q = node[c]
                    if q < n - 1:
                        u = logit[c] * scale
                        visits += 1
                        node[c] = 2 * q + 1 + (u < 0)
                        if not (u >= half or u <= -half):
                            finite &= u == u
                            log_left, log_right = log_sides(u)
                            taken, other = (log_right, log_left) if u < 0 else (log_left, log_right)
                            top = g * depth + stacked[g]
                            stack_node[top] = 2 * q + 2 - (u < 0)
                            stack_tree[top] = j
                            stack_log_v[top] = log_v[c] + other
                            stacked[g] += 1
                            log_v[c] += taken
        for c in range(size * k):
            node[c] = leaf_at(node[c], n, first_deep)
        for g in range(size):
            node_logits(logit, node, g * k, k, leaf_weight, leaf_bias, n, x, row[g], p)
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
                    u = node_logit(split_weight, split_bias, j * (n - 1) + q, x, b, p) * scale
                    current[g] = 2 * q + 1 + (u < 0)
                    if not (u >= half or u <= -half):
                        finite &= u == u
                        log_left, log_right = log_sides(u)
                        top = g * depth + stacked[g]
                        stack_node[top], stack_tree[top] = 2 * q + 2, j
                        stack_log_v[top] = current_log_v[g] + log_right
                        stacked[g] += 1
                        current[g] = 2 * q + 1
                        current_log_v[g] += log_left
                elif leaves[g] < leaf_capacity:
                    i = leaf_at(q, n, first_deep)
                    leaf = g * leaf_capacity + leaves[g]
                    leaf_expert[leaf] = i
                    leaf_logit[leaf] = (
                        node_logit(leaf_weight, leaf_bias, j * n + i, x, b, p) + current_log_v[g]
                    )
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
            is_few = leaves[g] <= FEW_LEAVES
            if not is_few and len(mass) == 0:
                mass = np.zeros(n, dtype)
            for leaf in range(first_leaf, first_leaf + leaves[g]):
                e = math.exp(leaf_logit[leaf] - peak)
                i = leaf_expert[leaf]
                if e > 0:
                    total += e
                    slot = experts
                    if is_few:
                        slot = 0
                        while slot < experts and leaf_expert[first_leaf + slot] != i:
                            slot += 1
                    elif mass[i] > 0:
                        mass[i] += e
                        continue
                    else:
                        mass[i] = e
                    # The experts found so far take the places of leaves that were read.
                    if slot == experts:
                        leaf_expert[first_leaf + slot], leaf_logit[first_leaf + slot] = i, e
                        experts += 1
                    else:
                        leaf_logit[first_leaf + slot] += e
            start, capacity = b * slots, slots
            if has_offsets:
                start, capacity = offsets[b], offsets[b + 1] - offsets[b]
            for slot in range(experts):
                i = leaf_expert[first_leaf + slot]
                weight = leaf_logit[first_leaf + slot]
                if not is_few:
                    weight, mass[i] = mass[i], 0
                if slot < capacity:
                    out_expert[start + slot], out_weight[start + slot] = i, weight / total
            for slot in range(experts, capacity):
                out_expert[start + slot], out_weight[start + slot] = 0, 0
            if experts > capacity and not has_offsets:
                out_expert[start] = -experts
            most_experts = max(most_experts, experts)
        group += size
    summary[3 * part], summary[3 * part + 1], summary[3 * part + 2] = most_experts, visited, finite
