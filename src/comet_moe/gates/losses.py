"""Auxiliary losses that keep a gate balanced and informative, for any gate.

Each function takes the routing of one gate, or those of several gates that share their experts, such as one
per task. Their rows then count together, so that not all tasks use the same expert. Padding is left out. Rows
that are spread over several processes count together where ``ranks`` are given.

Shapes: B rows, n experts, k trees or selectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from comet_moe import checks
from comet_moe.gates.ranks import Ranks, sum_over_batch
from comet_moe.routing import Routing, entropy_terms


def load_balancing_loss(routings: Routing | Sequence[Routing], ranks: Ranks | None = None) -> Tensor:
    r"""Load-balancing loss (Fedus et al. 2021): k for equal loads with k experts per row, k·n at worst.

    .. math:: n \sum_{i=1}^n f_i P_i, \qquad f_i = \frac{1}{B} |\{b: g(x_b)_i > 0\}|, \qquad
        P_i = \frac{1}{B} \sum_{b=1}^B p_{bi}

    p are the probabilities of the experts: the softmax over all logits where a gate has logits, else its
    weights. With f as a share of rows this equals ``load_balancing_loss_func`` of transformers. Divided by k
    it is the form with f as a share of the (row, choice) pairs.

    Example:
        >>> import torch
        >>> from comet_moe.gates import TopKGate
        >>> from comet_moe.gates.losses import load_balancing_loss
        >>> load_balancing_loss(TopKGate(8, 4, normalize="all")(torch.zeros(6, 8))).item()
        1.0
    """
    loads, probabilities, rows = [], [], []
    for routing in _as_sequence(routings):
        if routing.in_pairs and routing.logits is None:
            _, expert, weight = routing.pairs()
            share, _ = _pair_shares(routing)
            loads.append(
                share.new_zeros(routing.num_experts).index_add(0, expert, (weight.detach() != 0).to(share))
            )
            probabilities.append(share.new_zeros(routing.num_experts).index_add(0, expert, share))
            rows.append(_count_rows(routing, share))
            continue
        weights = routing.weights.flatten(0, -2)
        logits = routing.logits
        probability = _shares(weights) if logits is None else logits.flatten(0, -2).softmax(-1)
        counted = _counted_rows(routing, weights)
        loads.append(((weights.detach() != 0) * counted).sum(0))
        probabilities.append((probability * counted).sum(0))
        rows.append(counted.sum())
    load, probability, total = sum_over_batch(ranks, _add(loads), _add(probabilities), _add(rows))
    total = total.clamp_min(1)
    return len(load) * (load / total * probability / total).sum()


def z_loss(routings: Routing | Sequence[Routing], ranks: Ranks | None = None) -> Tensor:
    r"""Squared log-sum-exp of the logits (Zoph et al. 2022), which keeps them small; needs router logits.

    .. math:: \frac{1}{B} \sum_{b=1}^B \left( \log \sum_{i=1}^n \exp(\mathrm{logit}_{bi}) \right)^2
    """
    squares, rows = [], []
    for routing in _as_sequence(routings):
        if routing.logits is None:
            raise ValueError("z_loss needs router logits, which this gate does not have: set z_loss to 0")
        logits = routing.logits.flatten(0, -2)
        counted = _counted_rows(routing, logits)
        squares.append((logits.logsumexp(-1, keepdim=True).square() * counted).sum())
        rows.append(counted.sum())
    square_sum, total = sum_over_batch(ranks, _add(squares), _add(rows))
    return square_sum / total.clamp_min(1)


def information_loss(routings: Routing | Sequence[Routing], ranks: Ranks | None = None) -> Tensor:
    r"""Minus the information between row and expert, in nats; H is the entropy.

    .. math:: \sum_{j=1}^k \left( \frac{1}{B} \sum_{b=1}^B H(v_b^{(j)})
        - H(\frac{1}{B} \sum_{b=1}^B v_b^{(j)}) \right)

    The sum is over the trees or selectors v of one gate that has them. There it replaces the entropy loss: it
    makes a tree one-hot and keeps it from sending all rows to one leaf. For a gate without, and for several
    gates together, v are the weights, each row divided by its sum. Rows without an expert are left out, as in
    :class:`~comet_moe.statistics.RoutingStatistics`.
    """
    routings = _as_sequence(routings)
    sums = [_distribution_sums(routing, of_trees=len(routings) == 1) for routing in routings]
    distribution_sum, entropy_sum, rows = sum_over_batch(ranks, *map(_add, zip(*sums, strict=True)))
    rows = rows.clamp_min(1)
    return entropy_sum / rows - _entropy(distribution_sum / rows).sum()


@dataclass(frozen=True)
class Regularizer:
    """A weighted sum of the three losses, of one gate or of several together.

    Args:
        load_balance, z_loss, information: weight of each; 0 leaves it out.
    """

    load_balance: float = 0.0
    z_loss: float = 0.0
    information: float = 0.0

    def __post_init__(self) -> None:
        for name in ("load_balance", "z_loss", "information"):
            checks.not_negative(name, getattr(self, name))

    def __call__(self, routings: Routing | Sequence[Routing], ranks: Ranks | None = None) -> Tensor:
        """The auxiliary loss, a scalar; of the rows of all ``ranks`` where they are given."""
        loss = _as_sequence(routings)[0].stored_weights.new_zeros(())
        if self.load_balance:
            loss = loss + self.load_balance * load_balancing_loss(routings, ranks)
        if self.z_loss:
            loss = loss + self.z_loss * z_loss(routings, ranks)
        if self.information:
            loss = loss + self.information * information_loss(routings, ranks)
        return loss

    def __bool__(self) -> bool:
        return bool(self.load_balance or self.z_loss or self.information)


def masked_mean(values: Tensor, mask: Tensor | None, ranks: Ranks | None = None) -> Tensor:
    """Mean of ``values`` (B, ...) over the rows that are not padding: a scalar, 0 where there are none."""
    if ranks is not None:
        rows = values.new_tensor(values.numel()) if mask is None else mask.sum().to(values.dtype)
        total, rows = ranks.sum((values if mask is None else values * mask).sum(), rows)
        return total / rows.clamp_min(1)
    if mask is not None:
        return (values * mask).sum() / mask.sum().clamp_min(1)
    return values.sum() / max(values.numel(), 1)


def selector_entropy(selectors: Tensor) -> Tensor:
    """Entropy Σ_j Σ_i -v log(v + 1e-6) of each row's k distributions, in nats: (B, ..., k, n) -> (B, ...)."""
    return entropy_terms(selectors).sum((-2, -1))


def _entropy(distribution: Tensor) -> Tensor:
    """Entropy over the last dimension, which stays with size 1; its gradient is finite at 0."""
    return entropy_terms(distribution).sum(-1, keepdim=True)


def _shares(weights: Tensor) -> Tensor:
    """Each row divided by its sum; a row without weight stays 0."""
    row_sum = weights.sum(-1, keepdim=True)
    return weights / row_sum.masked_fill(row_sum == 0, 1.0)


def _distribution_sums(routing: Routing, of_trees: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over rows: the distributions v, (k, n) or (1, n) for weights, their entropies, and the rows."""
    leaves, n = routing.tree_pairs if of_trees else None, routing.num_experts
    if leaves is not None:
        counted = leaves.probability.new_zeros(prod(routing.batch_shape))
        counted[leaves.sample[(leaves.tree == 0) & (leaves.probability != 0)]] = 1.0
        counted = counted if routing.mask is None else counted * routing.mask.flatten()
        path = leaves.probability * counted[leaves.sample]
        by_leaf = path.new_zeros(leaves.trees * n).index_add(0, leaves.tree * n + leaves.expert, path)
        return by_leaf.view(leaves.trees, n), entropy_terms(path).sum(), counted.sum()
    if of_trees and routing.selectors is not None:
        distributions = routing.selectors.flatten(0, -3)  # (B, k, n)
    elif routing.in_pairs:
        share, routed = _pair_shares(routing)
        by_expert = share.new_zeros(n).index_add(0, routing.pairs().expert, share)
        return by_expert.unsqueeze(0), entropy_terms(share).sum(), routed
    else:
        distributions = _shares(routing.weights.flatten(0, -2)).unsqueeze(-2)
    counted = (_counted_rows(routing, distributions) * distributions.detach().any(-1)[:, :1]).unsqueeze(-1)
    return (distributions * counted).sum(0), (_entropy(distributions) * counted).sum(), counted.sum()


def _pair_shares(routing: Routing) -> tuple[Tensor, Tensor]:
    """The weights of the pairs, each divided by the sum of its row, and the number of rows with a weight."""
    sample, _, weight = routing.pairs()
    row_sum = weight.new_zeros(prod(routing.batch_shape)).index_add(0, sample, weight)
    return weight / row_sum[sample], (row_sum.detach() > 0).sum().to(weight.dtype)


def _count_rows(routing: Routing, like: Tensor) -> Tensor:
    """The number of rows that are not padding, a scalar."""
    return like.new_tensor(prod(routing.batch_shape)) if routing.mask is None else routing.mask.sum().to(like)


def _counted_rows(routing: Routing, like: Tensor) -> Tensor:
    """(rows, 1): 1 for a row that counts, 0 for padding."""
    if routing.mask is None:
        return like.new_ones(len(like), 1)
    return routing.mask.flatten().unsqueeze(-1).to(like.dtype)


def _add(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)


def _as_sequence(routings: Routing | Sequence[Routing]) -> Sequence[Routing]:
    return [routings] if isinstance(routings, Routing) else routings
