"""Quantile balancing: a bias per expert with which a batch loads all experts alike.

A row selects expert j by its score s_j if s_j + b_j is at least a threshold α. It lies between the k-th and
the (k+1)-th largest score with bias of the row. So b_j selects the share k/n of the rows if it is the k/n
quantile of the margins α - s_j. A histogram of the margins is enough, and those of several ranks add up.

Shapes: B rows, n experts.
"""

import torch
from torch import Tensor

from comet_moe.gates.ranks import Ranks, sum_over_ranks

BINS = 1000
"""Bins of a histogram: of the cube root of the margin, since bins are to be narrow around 0."""

WIDEST = 2.0
"""Margins beyond are counted in the last bin; scores are between 0 and 1, and biases of that size."""


def count_margins(histogram: Tensor, scores: Tensor, k: int, mask: Tensor | None) -> None:
    """Add the margins α - (s_j + b_j) of the rows that are not padding to ``histogram``.

    Args:
        histogram: (n, BINS) int64.
        scores: (B, ..., n), with biases.
        k: experts per row, below n.
        mask: (B, ...) bool, or None.
    """
    best = scores.topk(k + 1, dim=-1).values
    threshold = best[..., -2:].mean(-1, keepdim=True)
    warped = ((threshold - scores) / WIDEST).clamp(-1, 1)
    warped = warped.sign() * warped.abs() ** (1 / 3)
    places = ((warped + 1) * (BINS / 2)).long().clamp_max(BINS - 1)
    places = places + torch.arange(scores.shape[-1], device=scores.device) * BINS
    is_row = torch.ones_like(places) if mask is None else mask.unsqueeze(-1).expand_as(places).long()
    histogram.view(-1).index_add_(0, places.flatten(), is_row.flatten())


def move_to_quantile(bias: Tensor, histogram: Tensor, k: int, ranks: Ranks | None) -> None:
    """Move ``bias`` (n,) by the k/n quantiles of ``histogram``, of all ranks; its mean becomes 0.

    Margins contain the bias that they were computed with, so the quantiles are moves. An empty histogram
    moves nothing.
    """
    counts = sum_over_ranks(histogram, ranks)
    below = counts.cumsum(-1).to(bias.dtype)
    wanted = below[:, -1:] * (k / len(counts))
    place = torch.searchsorted(below, wanted).clamp_max(BINS - 1)
    inside = counts.gather(-1, place).to(bias.dtype)
    before = below.gather(-1, place) - inside
    edge = (place + (wanted - before) / inside.clamp_min(1)) / (BINS / 2) - 1  # the inverse of the warping
    move = (WIDEST * edge**3).squeeze(-1)
    moved = bias + torch.where(below[:, -1] > 0, move, 0)
    bias.copy_(moved - moved.mean())
