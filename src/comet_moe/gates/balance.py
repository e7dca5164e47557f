"""Balanced trees: every node halves the rows that reach it, by statistics of its logits over these rows.

Shapes: B rows, k trees, n - 1 nodes in heap order. d = w·x + bias are the logits of a node, and r the
probability that a row reaches it: the product of the branch probabilities above.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from comet_moe.gates.smoothing import smooth_step_sides

EPSILON = 1e-5
"""Added to a variance, as in batch normalisation."""
MOMENTUM = 0.1
"""Weight of a step in the running statistics of a node, once it was reached in ten."""


def balance_splits(
    splits: Tensor,
    width: float | Tensor,
    mask: Tensor | None,
    normalize: bool,
    max_paths: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits d (B, k, n-1), normalised over the rows that reach each node, and r (B, k, n-1).

    The probabilities r are constants for the gradient, as the weights of the mean and of the deviation are.

    Args:
        splits: d.
        width: width of the smooth step.
        mask: (B,) bool, False where a row is padding: it reaches nothing.
        normalize: False returns ``splits`` as they are.
        max_paths: nodes of a level that a row reaches at most, the likeliest ones; None has no limit.
    """
    rows = splits.new_ones(len(splits)) if mask is None else mask.to(splits.dtype)
    reached = rows[:, None, None].expand(-1, splits.shape[1], 1)
    by_level, reach_by_level = [splits[..., :0]], [splits[..., :0]]
    for first, last in _levels(splits.shape[-1]):
        level, leaves = splits[..., first:last], reached[..., last - first :]
        reached = reached[..., : last - first]
        if normalize:
            total = reached.sum(0).clamp_min(torch.finfo(splits.dtype).tiny)
            centred = level - (reached * level).sum(0) / total
            variance = (reached * centred.square()).sum(0) / total
            level = centred * (variance + EPSILON).rsqrt()
        by_level.append(level)
        reach_by_level.append(reached)
        sides = torch.stack(smooth_step_sides(level.detach(), width), -1)
        reached = torch.cat(((reached.unsqueeze(-1) * sides).flatten(-2), leaves), -1)
        if max_paths is not None and reached.shape[-1] > max_paths:
            order = reached.argsort(dim=-1, descending=True, stable=True)
            reached = reached.scatter(-1, order[..., max_paths:], 0.0)
    return torch.cat(by_level, -1), torch.cat(reach_by_level, -1)


def normalized(logit: Tensor, reached: Tensor, node: Tensor) -> Tensor:
    """The logits (M,) of visits, normalised over those of the same ``node`` with the weights ``reached``."""
    distinct, group = node.unique(return_inverse=True)

    def sum_by_node(values: Tensor) -> Tensor:
        return values.new_zeros(len(distinct)).index_add(0, group, values)

    total = sum_by_node(reached).clamp_min(torch.finfo(logit.dtype).tiny)
    centred = logit - (sum_by_node(reached * logit) / total)[group]
    variance = sum_by_node(reached * centred.square()) / total
    return centred * (variance + EPSILON).rsqrt()[group]


def _levels(internal: int) -> Iterator[tuple[int, int]]:
    """The first node of each level, and that after its last one."""
    first = 0
    while first < internal:
        yield first, min(2 * first + 1, internal)
        first = 2 * first + 1


def node_sums(splits: Tensor, reached: Tensor, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What the running statistics need of each visit: r, then r·d and r·d², or r·sign(d) and r·|d|.

    The second pair is for a median. It moves by the share of the rows on either side, so that it is found
    whatever the number of rows per step is.
    """
    if normalize:
        return reached, reached * splits, reached * splits.square()
    return reached, reached * splits.sign(), reached * splits.abs()


def move_statistics(sums: Tensor, bias: Tensor, deviation: Tensor, steps: Tensor, normalize: bool) -> None:
    r"""Move the running statistics of the nodes that were reached, in place.

    With the rate η = max(1 / (steps + 1), 0.1), sums S over the rows of a step, s = deviation:

    .. math:: \mathrm{normalize:} \quad \mathrm{bias} \mathrel{-}= η \frac{S(rd)}{S(r)}, \quad
        s^2 \mathrel{+}= η (\mathrm{Var}(d) - s^2) \qquad \mathrm{median:} \quad
        s \mathrel{+}= η (\frac{S(r |d|)}{S(r)} - s), \quad
        \mathrm{bias} \mathrel{-}= η s \frac{S(r \, \mathrm{sign}(d))}{S(r)}

    Args:
        sums: (3, k, n-1), :func:`node_sums` summed over the rows of the step.
        bias, deviation, steps: (k, n-1); steps counts those in which a row reached the node.
        normalize: which of the two.
    """
    is_reached = sums[0] > 0
    first, second = sums[1:] / sums[0].clamp_min(torch.finfo(sums.dtype).tiny)
    rate = (1 / (steps + 1)).clamp_min(MOMENTUM)
    if normalize:
        variance = (second - first.square()).clamp_min(0)
        moved = torch.lerp(deviation.square(), variance, rate).sqrt()
        shift = rate * first
    else:
        moved = torch.lerp(deviation, second, rate)
        shift = rate * moved * first
    deviation.copy_(torch.where(is_reached, moved, deviation))
    bias.copy_(torch.where(is_reached, bias - shift, bias))
    steps.add_(is_reached)
