"""Inference of a COMET gate: each sample walks down each tree, and only the nodes it meets are evaluated.

At a node inside (-γ/2, γ/2) both sides are followed, so the weights are those of the dense gate. The cost is
O(k p log n) per sample where paths are hard; no tensor of size (B, n) is formed.

Samples walk in small groups, one level at a time. The next nodes of a group do not depend on each other, so
the processor loads their weights at the same time. Two trees of a sample share each pass over its features.
The other sides of soft nodes are put on a stack per sample and walked afterwards.

For graphs and under dispatch modes the descent is also a torch operator, :func:`descend_op`. It returns
weights (B, n), because the size of anything smaller would depend on the values.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from comet_moe.kernels.jit import extends_numba, is_plain_cpu, is_worth_compiling, jit, why_not_numba
from comet_moe.kernels.soft_trees import _first_deep, _leaf_at, _log_sides, soft_trees
from comet_moe.kernels.threads import count_threads, over_rows

SLOTS_PER_TREE = 8
"""Slots per tree that a sample has at first; one that reaches more experts is walked a second time."""

GROUP = 8
"""Samples that walk together."""
GROUP_LEAVES = 128
"""Leaves of one sample that a group can store; a group with more of them walks one by one."""
SINGLE_ROWS = 64
"""Samples that walk one by one, with capacity for all leaves, after a group exceeded ``GROUP_LEAVES``."""

MORE_ROWS = 128
"""Rows by which a batch counts as larger: single rows are routed one after the other, many times."""

_NO_INDICES = np.empty(0, np.int64)
_NUMPY_TYPES = {torch.float32: np.float32, torch.float64: np.float64}


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
        *[_in_order(t, dtype) for t in parameters]
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


def _in_order(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` if its memory holds the values of this type one after the other, else a copy that does."""
    if tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    if tensor.is_neg():  # a lazy negation
        tensor = tensor.resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


class Descent(NamedTuple):
    """The experts that samples reach, in a number of slots per sample; unused slots have weight 0.

    Attributes:
        expert: (B, slots) int64; for a sample that reaches more experts, the first is minus their number.
        weight: (B, slots).
        most_experts: the most experts that one sample reaches.
        visited: number of nodes and leaves that were evaluated.
        finite: whether all their logits are finite; if not, the weights are undefined.
    """

    expert: Any
    weight: Any
    most_experts: int
    visited: int
    finite: bool

    @property
    def fits(self) -> bool:
        """Whether every sample has slots for all its experts."""
        return self.most_experts <= self.expert.shape[1]


def descend(x: Tensor, trees: Trees, gamma: float) -> Descent:
    """Walk ``x`` (B, p), on the CPU and of the type of the trees, down the trees."""
    k, n, p = sizes = tuple(trees.leaf_weight.shape)
    x, rows = _read_rows(x, trees), x.shape[0]
    shape = rows, k * min(SLOTS_PER_TREE, n)
    expert, weight = np.zeros(shape, np.int64), np.zeros(shape, _NUMPY_TYPES[x.dtype])
    work = rows * k * n.bit_length() * p
    outputs = (expert, weight, _NO_INDICES, _NO_INDICES)
    most_experts, visited, finite = _walk_rows(rows, work, x, trees, sizes, gamma, *outputs)
    return Descent(expert, weight, most_experts, visited, finite)


def descend_again(x: Tensor, trees: Trees, gamma: float, first: Descent) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs (sample, expert, weight), ordered by sample, after a descent without enough slots."""
    x = _read_rows(x, trees)
    fits = first.expert[:, 0] >= 0
    used = fits[:, None] & (first.weight != 0)
    count = np.where(fits, used.sum(1), -first.expert[:, 0])
    offsets = np.concatenate(([0], count.cumsum()))
    sample = np.repeat(np.arange(len(count)), count)
    expert, weight = np.empty((1, len(sample)), np.int64), np.empty((1, len(sample)), first.weight.dtype)
    expert[0, fits[sample]], weight[0, fits[sample]] = first.expert[used], first.weight[used]
    chosen = np.flatnonzero(~fits)
    sizes, work = trees.leaf_weight.shape, int(count[chosen].sum()) * x.shape[1]
    _walk_rows(len(chosen), work, x, trees, sizes, gamma, expert, weight, offsets, chosen)
    return torch.from_numpy(sample), torch.from_numpy(expert[0]), torch.from_numpy(weight[0])


def _walk_rows(
    rows: int, work: int, x: Tensor, trees: Trees, sizes: Sequence[int], gamma: float, *outputs: Any
) -> tuple[int, int, bool]:
    """:func:`_walk` in threads: the most experts of a row, nodes visited, whether all logits are finite.

    Inputs go by their addresses: on one row, arrays of them would take as long as the walk.
    """
    parts = count_threads(rows, work)
    summary = np.empty((parts, 3), np.int64)
    addresses = [tensor.data_ptr() for tensor in (x, *trees)]
    over_rows(_walk, parts, rows, *addresses, x.shape[0], *sizes, gamma, *outputs, summary)
    if parts == 1:
        most_experts, visited, finite = summary[0].tolist()
        return most_experts, visited, bool(finite)
    return int(summary[:, 0].max()), int(summary[:, 1].sum()), bool(summary[:, 2].all())


def _read_rows(x: Tensor, trees: Trees) -> Tensor:
    """``x`` (B, p), contiguous."""
    p, dtype = trees.leaf_weight.shape[2], trees.leaf_weight.dtype
    if x.dim() != 2 or x.shape[1] != p or x.dtype is not dtype:
        raise ValueError(f"x must have shape (B, {p}) and dtype {dtype}, got {tuple(x.shape)} and {x.dtype}")
    return _in_order(x, dtype)


def array_at(address: int, size: int, dtype: Any) -> Any:
    """The array of ``size`` numbers that begins at ``address``; for compiled functions only."""
    raise NotImplementedError


@extends_numba
def _define_array_at() -> None:
    from llvmlite.ir import IRBuilder
    from numba import carray, types  # type: ignore[attr-defined, unused-ignore]
    from numba.extending import intrinsic, overload

    convert = IRBuilder.inttoptr  # looked up here: where it has moved, torch's operators run

    @intrinsic
    def pointer_to(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return convert(builder, values[0], context.get_value_type(types.voidptr))

        return types.voidptr(types.int64), generate

    to_pointer: Any = pointer_to

    @overload(array_at)
    def _array_at(address: Any, size: Any, dtype: Any) -> Any:
        def make(address: Any, size: Any, dtype: Any) -> Any:
            return carray(to_pointer(address), (size,), dtype)

        return make


@jit
def _walk(
    part: int,
    first: int,
    last: int,
    x_address: int,
    split_weight_address: int,
    split_bias_address: int,
    leaf_weight_address: int,
    leaf_bias_address: int,
    rows: int,
    k: int,
    n: int,
    p: int,
    gamma: float,
    out_expert: Any,
    out_weight: Any,
    offsets: Any,
    chosen: Any,
    summary: Any,
) -> None:
    """Walk rows first..last-1 of x, or rows chosen[first..last-1].

    Nothing is checked here: callers make sure that all sizes agree.

    Args:
        part: row of ``summary`` to write.
        first, last: rows of x, or indices into ``chosen``.
        x_address: of x (rows, p); as the next four, contiguous and of the type of ``out_weight``.
        split_weight_address, split_bias_address: (k, n-1, p), (k, n-1).
        leaf_weight_address, leaf_bias_address: (k, n, p), (k, n).
        rows, k, n, p: these sizes.
        gamma: width of the smooth-step.
        out_expert, out_weight: (rows, capacity), zeros at the start; with offsets (1, all pairs). A row that
            reaches more experts than its capacity gets minus their number in its first slot.
        offsets: (rows + 1,) where the pairs of each row begin, or empty.
        chosen: rows to walk, or empty for all of them.
        summary: (parts, 3): the largest number of experts of a row, the number of nodes and leaves visited,
            and 1 if all logits are finite, else 0.
    """
    dtype = out_weight.dtype
    x = array_at(x_address, rows * p, dtype)
    split_weight = array_at(split_weight_address, k * (n - 1) * p, dtype)
    split_bias = array_at(split_bias_address, k * (n - 1), dtype)
    leaf_weight, leaf_bias = (
        array_at(leaf_weight_address, k * n * p, dtype),
        array_at(leaf_bias_address, k * n, dtype),
    )
    kind = dtype.type
    half, scale = kind(0.5), kind(1 / gamma)
    first_deep = _first_deep(n)
    levels = 0  # ceil(log2 n), the splits on the longest path from the root
    while (1 << levels) < n:
        levels += 1
    depth = k * levels + levels  # nodes on a stack at most: of each tree, and of the tree walked last
    chains, stack_size, leaf_count = GROUP * k, GROUP * depth, max(k * n, GROUP * GROUP_LEAVES)
    node, log_v, logit = np.empty(chains, np.int64), np.empty(chains, dtype), np.empty(chains, dtype)
    row, stacked, leaves = np.empty(GROUP, np.int64), np.empty(GROUP, np.int64), np.empty(GROUP, np.int64)
    current, current_tree = np.empty(GROUP, np.int64), np.empty(GROUP, np.int64)
    current_log_v = np.empty(GROUP, dtype)
    stack_node, stack_tree = np.empty(stack_size, np.int64), np.empty(stack_size, np.int64)
    stack_log_v = np.empty(stack_size, dtype)
    leaf_expert, leaf_logit = np.empty(leaf_count, np.int64), np.empty(leaf_count, dtype)
    mass = np.empty(n, dtype)
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
    summary[part, 0], summary[part, 1], summary[part, 2] = most_experts, visited, finite


@jit(is_inlined=True)
def _logits(
    out: Any, node: Any, chain: int, k: int, weights: Any, bias: Any, width: int, x: Any, b: int, p: int
) -> None:
    """out[chain + j] = the logit of row b at node[chain + j] of tree j, where that is below ``width``."""
    for j in range(0, k, 2):
        one = j * width + node[chain + j]
        if j + 1 < k and node[chain + j] < width and node[chain + j + 1] < width:
            two = (j + 1) * width + node[chain + j + 1]
            dot_one, dot_two = _two_dots(weights, one, two, x, b, p)
            out[chain + j], out[chain + j + 1] = dot_one + bias[one], dot_two + bias[two]
        else:
            for tree in range(j, min(j + 2, k)):
                if node[chain + tree] < width:
                    out[chain + tree] = _logit(weights, bias, tree * width + node[chain + tree], x, b, p)


# All arrays below are flat. Indices are unsigned: a signed one might count from the end, which would not
# vectorise.


@jit(is_inlined=True)
def _logit(weights: Any, bias: Any, node: int, x: Any, b: int, p: int) -> Any:
    """The logit of row b of x (·, p) at row ``node`` of weights (·, p)."""
    dot = x.dtype.type(0)
    start, x_start = node * p, b * p
    for c in range(p):
        dot += weights[np.uint64(start + c)] * x[np.uint64(x_start + c)]
    return dot + bias[node]


@jit(is_inlined=True)
def _two_dots(weights: Any, one: int, two: int, x: Any, b: int, p: int) -> Any:
    """The products of rows ``one`` and ``two`` of weights (·, p) with row b of x (·, p)."""
    dot_one = dot_two = x.dtype.type(0)
    one_start, two_start, x_start = one * p, two * p, b * p
    for c in range(p):
        value = x[np.uint64(x_start + c)]
        dot_one += weights[np.uint64(one_start + c)] * value
        dot_two += weights[np.uint64(two_start + c)] * value
    return dot_one, dot_two


@torch.library.custom_op("comet_moe::descend", mutates_args=())
def descend_op(
    x: Tensor,
    split_weight: Tensor,
    split_bias: Tensor,
    leaf_weight: Tensor,
    leaf_bias: Tensor,
    gamma: float,
) -> Tensor:
    """(B, p) and the gate's parameters -> weights (B, n); NaN in rows that meet a logit of NaN."""
    parameters = (split_weight, split_bias, leaf_weight, leaf_bias)
    if not is_worth_compiling(descent_work(x, leaf_bias)) or why_not_numba():
        return _evaluate_all_nodes(x, parameters, gamma)
    trees = read_trees(parameters, x.dtype)
    descent = descend(x, trees, gamma)
    if not descent.finite:
        return _evaluate_all_nodes(x, parameters, gamma)
    weights = x.new_zeros(len(x), leaf_bias.shape[1])
    if descent.fits:
        expert, weight = torch.from_numpy(descent.expert), torch.from_numpy(descent.weight)
        return weights.scatter_add_(1, expert, weight)
    sample, expert, weight = descend_again(x, trees, gamma, descent)
    return weights.index_put_((sample, expert), weight)


def _evaluate_all_nodes(x: Tensor, parameters: Sequence[Tensor], gamma: float) -> Tensor:
    """The weights (B, n) as the dense gate makes them, which keeps a NaN in its own row."""
    split_weight, split_bias, leaf_weight, leaf_bias = parameters
    splits = F.linear(x, split_weight.flatten(0, 1), split_bias.flatten())
    alphas = F.linear(x, leaf_weight.flatten(0, 1), leaf_bias.flatten())
    shape = len(x), *leaf_bias.shape
    return soft_trees(splits.reshape(len(x), *split_bias.shape), alphas.reshape(shape), gamma).weights


@descend_op.register_fake
def _(
    x: Tensor,
    split_weight: Tensor,
    split_bias: Tensor,
    leaf_weight: Tensor,
    leaf_bias: Tensor,
    gamma: float,
) -> Tensor:
    return x.new_empty(x.shape[0], leaf_bias.shape[1])


@register_flop_formula(torch.ops.comet_moe.descend, get_raw=True)
def _flops(x: Tensor, *parameters: Any, out_val: Tensor, **_: object) -> int:
    """Two per feature of each node and leaf that was visited; of all of them where x has no values."""
    *tensors, gamma = parameters
    if not is_plain_cpu(x) or not is_worth_compiling(descent_work(x, tensors[3])) or why_not_numba():
        k, n, p = tensors[2].shape
        return 2 * x.shape[0] * p * k * (2 * n - 1)
    return 2 * x.shape[1] * descend(x, read_trees(tensors, x.dtype), gamma).visited
