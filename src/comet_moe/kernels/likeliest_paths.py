"""Trees with a ceiling on their cost: at each level a row keeps at most r nodes, the likeliest ones.

A row goes down level by level. Where soft splits give it more than r nodes, those of the largest probability
stay, the left one of two that are equal. So a row evaluates at most r nodes per level and tree, however soft
the splits are. The probabilities of the leaves it reaches are divided by their sum. Which nodes stay is a
constant for the gradient. Shapes are those of :mod:`comet_moe.kernels.tree_walk`.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from comet_moe.kernels.jit import jit
from comet_moe.kernels.nodes import (
    DONE,
    FULL,
    GROUP,
    add_sums,
    first_deep_node,
    leaf_at,
    log_sides,
    node_logit,
    put,
)
from comet_moe.kernels.soft_trees import EPSILON, SoftTrees, log_smooth_step_sides, path_sums


def likeliest_trees_torch(
    splits: Tensor, alphas: Tensor, gamma: float | Tensor, most: int
) -> tuple[SoftTrees, Tensor]:
    """Soft trees over the likeliest ``most`` paths of each, and which trees (B, k) had more: the definition.

    Args:
        splits, alphas, gamma: see :func:`comet_moe.kernels.soft_trees.soft_trees`.
        most: r.
    """
    left, right = log_smooth_step_sides(splits, gamma)
    kept, is_cut = _keep_likeliest(left.detach(), right.detach(), most)
    log_paths = path_sums(left, right).masked_fill(~kept, -torch.inf)
    log_total = log_paths.logsumexp(-1, keepdim=True)
    log_paths = torch.where(is_cut.unsqueeze(-1), log_paths - log_total, log_paths)
    contributions = (alphas + log_paths).flatten(-2).softmax(-1).unflatten(-1, alphas.shape[-2:])
    paths = log_paths.exp()
    entropy = -(paths * (paths + EPSILON).log()).sum((-2, -1))
    return SoftTrees(contributions.sum(-2), contributions, paths, entropy), is_cut


def _keep_likeliest(left: Tensor, right: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The leaves (B, k, n) that rows keep, and whether they dropped any (B, k).

    ``left`` and ``right`` are the logs of the probabilities of the two sides.
    """
    internal = left.shape[-1]
    log_v = left.new_zeros(*left.shape[:-1], 1)
    is_cut = torch.zeros(left.shape[:-1], dtype=torch.bool, device=left.device)
    first, width = 0, 1
    while first < internal:
        splits = min(width, internal - first)
        edges = torch.stack((left[..., first : first + splits], right[..., first : first + splits]), -1)
        children = (log_v[..., :splits].unsqueeze(-1) + edges).flatten(-2)
        log_v = torch.cat((children, log_v[..., splits:]), -1)
        if log_v.shape[-1] > most:
            is_cut = is_cut | ((log_v > -torch.inf).sum(-1) > most)
            order = log_v.argsort(dim=-1, descending=True, stable=True)
            is_kept = torch.zeros_like(log_v, dtype=torch.bool).scatter(-1, order[..., :most], True)
            log_v = log_v.masked_fill(~is_kept, -torch.inf)
        first, width = first + width, 2 * width
    return log_v > -torch.inf, is_cut


@jit
def walk_likeliest(
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
    most: int,
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
    """As ``tree_walk._walk``, with at most ``most`` nodes of each row and tree at each level.

    Chains, the trees of a group of rows, go down together. The nodes of chain c are at c · 2 · most, from
    left to right.
    """
    n = len(leaf_bias) // k
    kind = x.dtype.type
    half, scale = kind(0.5), kind(1 / gamma)
    first_deep = first_deep_node(n)
    levels = 0  # ceil(log2 n)
    while (1 << levels) < n:
        levels += 1
    size_of = 2 * most
    chains = GROUP * k
    count, is_cut = np.empty(chains, np.int64), np.empty(chains, np.int64)
    node, edge = np.empty(chains * size_of, np.int64), np.empty(chains * size_of, np.int64)
    log_v = np.empty(chains * size_of, x.dtype)
    new_node, new_edge = np.empty(size_of, np.int64), np.empty(size_of, np.int64)
    new_log_v = np.empty(size_of, x.dtype)
    start = first * capacity
    part_capacity = (last - first) * capacity
    softs = leaves = visited = cut = 0
    has_sums = sums.shape[3] > 0
    status, finite = DONE, True
    for group in range(first, last, GROUP):
        busy = min(GROUP, last - group) * k
        for c in range(busy):
            node[c * size_of], edge[c * size_of], log_v[c * size_of] = 0, -1, 0
            count[c], is_cut[c] = 1, 0
        for _ in range(levels):
            for c in range(busy):
                j, b, at, found = c % k, group + c // k, c * size_of, 0
                for i in range(at, at + count[c]):
                    q, path = node[i], log_v[i]
                    if q >= n - 1:  # a leaf of the upper level
                        new_node[found], new_edge[found], new_log_v[found] = q, edge[i], path
                        found += 1
                        continue
                    logit = node_logit(split_weight, split_bias, j * (n - 1) + q, x, b, p)
                    visited += 1
                    if has_sums and (len(is_row) == 0 or is_row[b]):
                        add_sums(sums[part], j, q, logit, path)
                    u = logit * scale
                    new_node[found], new_edge[found], new_log_v[found] = 2 * q + 1 + (u < 0), edge[i], path
                    found += 1
                    if u >= half or u <= -half:
                        continue
                    finite &= u == u
                    if softs >= part_capacity:
                        status = FULL
                        break
                    log_left, log_right = log_sides(u)
                    put(soft_row, soft_node, soft_edge, start + softs, b, j * (n - 1) + q, edge[i])
                    soft_share[start + softs] = u
                    for side in range(2):
                        to = found - 1 + side
                        new_node[to], new_edge[to] = 2 * q + 1 + side, 2 * softs + side
                        new_log_v[to] = path + (log_right if side else log_left)
                    found += 1
                    softs += 1
                if status != DONE:
                    break
                if found > most:
                    is_cut[c] = 1
                    limit = np.sort(new_log_v[:found])[found - most]
                    ties = most
                    for i in range(found):
                        ties -= new_log_v[i] > limit
                    kept = 0
                    for i in range(found):
                        is_tie = new_log_v[i] == limit and ties > 0
                        if new_log_v[i] > limit or is_tie:
                            ties -= is_tie
                            new_node[kept], new_edge[kept] = new_node[i], new_edge[i]
                            new_log_v[kept] = new_log_v[i]
                            kept += 1
                    found = kept
                for i in range(found):
                    node[at + i], edge[at + i], log_v[at + i] = new_node[i], new_edge[i], new_log_v[i]
                count[c] = found
            if status != DONE:
                break
        for c in range(busy):
            for i in range(c * size_of, c * size_of + count[c]):
                if leaves >= part_capacity:
                    status = FULL
                if status != DONE:
                    break
                b, leaf = group + c // k, (c % k) * n + leaf_at(node[i], n, first_deep)
                alpha = node_logit(leaf_weight, leaf_bias, leaf, x, b, p)
                finite &= abs(alpha) < np.inf
                put(leaf_row, leaf_node, leaf_edge, start + leaves, b, leaf, edge[i])
                leaf_logit[start + leaves], leaf_log_path[start + leaves] = alpha + log_v[i], log_v[i]
                leaves += 1
                visited += 1
            cut += is_cut[c]
        if status != DONE:
            break
    summary[part, 0], summary[part, 1], summary[part, 2] = softs, leaves, status
    summary[part, 3], summary[part, 4], summary[part, 5] = finite, visited, start
    summary[part, 6] = cut
