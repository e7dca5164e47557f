"""One choice of experts for all tasks of a row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from comet_moe import checks
from comet_moe.routing import Routing


@dataclass(frozen=True)
class JointSelection:
    """Keeps, of the experts that the gates of T tasks weigh, the same few for every task of a row.

    With independent gates, T tasks ask for up to T·k experts per row. Here every task keeps the ``k_shared``
    experts with the largest score over all tasks, and its own ``k_private`` largest others. At most k_shared
    + T·k_private experts run for a row. Each task keeps its own weights on them, rescaled to the sum that the
    row had. Sparse gates of different tasks may select different experts. A task whose gate selected none of
    the shared ones weighs them by their score, without a gradient.

    Args:
        k_shared: experts that all tasks of a row share.
        k_private: further experts of each task.
        score: "sum" or "max" of the tasks' weights.

    Example:
        >>> import torch
        >>> from comet_moe import Routing
        >>> from comet_moe.gates import JointSelection
        >>> weights = torch.tensor([[[0.5, 0.4, 0.1]], [[0.1, 0.4, 0.5]]])
        >>> tasks = [Routing(weights=own) for own in weights]
        >>> [routing.weights.tolist() for routing in JointSelection(k_shared=1)(tasks)]
        [[[0.0, 1.0, 0.0]], [[0.0, 1.0, 0.0]]]
    """

    k_shared: int
    k_private: int = 0
    score: Literal["sum", "max"] = "sum"

    def __post_init__(self) -> None:
        checks.at_least_one("k_shared", self.k_shared)
        if isinstance(self.k_private, bool) or not isinstance(self.k_private, int) or self.k_private < 0:
            raise ValueError(f"k_private must be an integer of at least 0, got {self.k_private!r}")
        if self.score not in ("sum", "max"):
            raise ValueError(f'score must be "sum" or "max", got {self.score!r}')

    def __call__(self, routings: Sequence[Routing]) -> list[Routing]:
        """The routings of one batch, one per task, with weights 0 outside of the joint choice."""
        n = routings[0].num_experts
        weights = torch.stack([routing.weights for routing in routings])  # (T, B, ..., n)
        detached = weights.detach()
        score = detached.sum(0) if self.score == "sum" else detached.amax(0)
        kept = torch.zeros_like(weights, dtype=torch.bool)
        shared = score.topk(min(self.k_shared, n), -1).indices.expand(len(routings), *[-1] * score.dim())
        kept.scatter_(-1, shared, True)
        by_score = [_restrict(score * kept[0], routing) for routing in routings]
        if self.k_private and self.k_shared < n:
            others = detached.masked_fill(kept, -1.0)
            private = others.topk(min(self.k_private, n - self.k_shared), -1).indices
            kept.scatter_(-1, private, True)
        chosen = weights * kept
        has_none = (chosen == 0).all(-1, keepdim=True)
        chosen = torch.where(has_none, torch.stack(by_score), chosen)
        chosen_sum = chosen.sum(-1, keepdim=True)
        scale = weights.sum(-1, keepdim=True) / chosen_sum.masked_fill(chosen_sum == 0, 1.0)
        most = min(self.k_shared + self.k_private, n)
        return [
            routing.with_weights(own, most_experts=most)
            for routing, own in zip(routings, chosen * scale, strict=True)
        ]


def _restrict(weights: Tensor, routing: Routing) -> Tensor:
    """``weights`` (B, ..., n) of the experts that the gate of ``routing`` chooses among, 0 for others."""
    if routing.candidates is None:
        return weights
    allowed = torch.zeros_like(weights).index_fill(-1, routing.candidates, 1.0)
    return weights * allowed
