"""Training of trees with normalised splits over visited nodes: all rows go down together, level by level.

The mean and deviation of a node are those of the rows that reach it. So a level is normalised before any row
goes on. Values and gradients are those of all nodes, which tests compare them with.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from comet_moe.gates.balance import node_sums, normalized
from comet_moe.kernels.soft_trees import log_smooth_step_sides
from comet_moe.kernels.sparse_trees import node_logits
from comet_moe.kernels.tree_walk import Walk, most_visits

NORMALIZED_EXPERTS = 256
"""Number of experts from which rows walk; with fewer, one product for all nodes is as fast."""


class _Visits(NamedTuple):
    """Nodes of one level that rows visit, (M,) each, by row, by tree and from left to right.

    Attributes:
        row, tree, node: int64; ``node`` is an index into the heap.
        log_path: the log of the probability that the row reaches the node.
    """

    row: Tensor
    tree: Tensor
    node: Tensor
    log_path: Tensor

    def at(self, index: Tensor) -> "_Visits":
        return _Visits(*(values[index] for values in self))


def walk_normalized(
    x: Tensor,
    parameters: list[Tensor],
    gamma: float,
    mask: Tensor | None,
    max_paths: int | None,
    sparse: bool,
) -> Walk | None:
    """Walk ``x`` (B, p) down the trees; None if rows visit too many nodes to gain by it.

    The result has no soft splits, and ``leaf_logit`` and ``leaf_log_path`` are differentiable. Arguments are
    those of :func:`comet_moe.kernels.tree_walk.walk_trees`, and whether gradients are sparse tensors.
    """
    split_weight, split_bias, leaf_weight, leaf_bias = parameters
    (k, n), rows = leaf_bias.shape, len(x)
    is_counted = x.new_ones(rows) if mask is None else mask.to(x.dtype)
    row, tree = torch.arange(rows).repeat_interleave(k), torch.arange(k).repeat(rows)
    visits = _Visits(row, tree, torch.zeros_like(row), x.new_zeros(len(row)))
    sums, visited, finite = x.new_zeros(3, k * (n - 1)), 0, True
    is_cut = torch.zeros(rows * k, dtype=torch.bool)
    for _ in range((n - 1).bit_length()):
        inner = (visits.node < n - 1).nonzero().flatten()
        visited += len(inner)
        if max_paths is None and visited > most_visits(rows, k, n) * rows:
            return None
        splits = visits.at(inner)
        name = splits.tree * (n - 1) + splits.node
        logit = node_logits(x, split_weight, split_bias, splits.row, name, sparse)
        finite = finite and bool(logit.isfinite().all())
        reached = splits.log_path.detach().exp() * is_counted[splits.row]
        sums.index_add_(1, name, torch.stack(node_sums(logit.detach(), reached, normalize=True)))
        visits = _descend(visits, inner, normalized(logit, reached, name), gamma)
        if max_paths is not None:
            visits = _keep_likeliest(visits, max_paths, k, is_cut)
    first_deep = 2 ** (n - 1).bit_length() - 1
    place = visits.node - first_deep + torch.where(visits.node < first_deep, n, 0)
    leaf = visits.tree * n + place
    alpha = node_logits(x, leaf_weight, leaf_bias, visits.row, leaf, sparse)
    finite = finite and bool(alpha.isfinite().all())
    none, edge = leaf[:0], torch.full_like(leaf, -1)
    leaves = visits.row, leaf, edge, alpha + visits.log_path, visits.log_path
    counts = visited + len(leaf), finite, int(is_cut.sum())
    return Walk(none, none, none, x[:0, :0].flatten(), *leaves, sums.view(3, k, n - 1), *counts)


def _descend(visits: _Visits, inner: Tensor, splits: Tensor, gamma: float) -> _Visits:
    """The visits of the next level: a row takes both sides of a soft split, and leaves stay.

    Args:
        visits: of this level.
        inner: (S,) which of them are splits.
        splits: (S,) their logits.
        gamma: width of the smooth step.
    """
    u = splits.detach() / gamma
    is_soft = u.abs() < 0.5
    takes_both = torch.zeros(len(visits.row), dtype=torch.bool).index_copy(0, inner, is_soft)
    goes_right = torch.zeros_like(takes_both).index_copy(0, inner, u < 0)
    parent = torch.arange(len(takes_both)).repeat_interleave(1 + takes_both.long())
    is_second = torch.zeros_like(takes_both[parent])
    is_second[1:] = parent[1:] == parent[:-1]
    below = visits.at(parent)
    is_right = torch.where(takes_both[parent], is_second, goes_right[parent])
    is_split = torch.zeros_like(takes_both).index_fill(0, inner, True)[parent]
    node = torch.where(is_split, 2 * below.node + 1 + is_right, below.node)
    sides = torch.stack(log_smooth_step_sides(splits[is_soft], gamma), -1).flatten()
    log_path = below.log_path.index_add(0, takes_both[parent].nonzero().flatten(), sides)
    return below._replace(node=node, log_path=log_path)


def _keep_likeliest(visits: _Visits, most: int, trees: int, is_cut: Tensor) -> _Visits:
    """The ``most`` likeliest visits of each row and tree, left before right; notes which had more."""
    chain = visits.row * trees + visits.tree
    counts = chain.bincount(minlength=len(is_cut))
    is_cut |= counts > most
    if not bool((counts > most).any()):
        return visits
    order = visits.log_path.detach().argsort(descending=True, stable=True)
    order = order[chain[order].argsort(stable=True)]
    rank = torch.arange(len(chain)) - (counts.cumsum(0) - counts)[chain]  # chains are in order
    return visits.at(order[rank < most].sort().values)
