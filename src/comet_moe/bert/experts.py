"""The experts of a sparse BERT: feed-forward layers that end in a LayerNorm of their own."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe.experts import Experts
from comet_moe.experts.grouped_linear import GroupedLinear


class BertExperts(Experts):
    """f_e(x) = LayerNorm_e(dropout(B_e activation(A_e x + a_e) + b_e) + x), as in MoEBERT.

    The mixture weighs what comes after the LayerNorm.

    Args:
        num_experts: E.
        features: p.
        neurons: of each expert.
        activation: between the layers, elementwise.
        dropout: probability of a zero in training.
        epsilon: of the LayerNorm.

    Attributes:
        inner, outer: the layers A, a (E, neurons, p) and B, b (E, p, neurons).
        norm_weight, norm_bias: (E, p).
    """

    def __init__(
        self,
        num_experts: int,
        features: int,
        neurons: int,
        activation: Callable[[Tensor], Tensor],
        dropout: float,
        epsilon: float,
    ):
        super().__init__()
        self.num_experts = num_experts
        self.inner = GroupedLinear(num_experts, features, neurons)
        self.outer = GroupedLinear(num_experts, neurons, features)
        self.norm_weight = nn.Parameter(torch.ones(num_experts, features))
        self.norm_bias = nn.Parameter(torch.zeros(num_experts, features))
        self.activation = activation
        self.dropout = dropout
        self.epsilon = epsilon

    def flops(self) -> int:
        """Of both layers."""
        return self.inner.flops() + self.outer.flops()

    def dense(self, x: Tensor) -> Tensor:
        """(B, p) -> (B, E, p)."""
        out = self._dropped(self.outer.each(self.activation(self.inner.shared(x)))) + x.unsqueeze(1)
        return F.layer_norm(out, out.shape[-1:], eps=self.epsilon) * self.norm_weight + self.norm_bias

    def one(self, rows: Tensor, expert: int) -> Tensor:
        """(m, p) -> (m, p)."""
        hidden = self.activation(self.inner.one(rows, expert))
        return self._normed(self._dropped(self.outer.one(hidden, expert)) + rows, expert)

    def sparse(self, rows: Tensor, counts: list[int]) -> Tensor:
        """(M, p) -> (M, p)."""
        hidden = self.activation(self.inner.grouped(rows, counts))
        out = self._dropped(self.outer.grouped(hidden, counts)) + rows
        return torch.cat([self._normed(part, expert) for expert, part in enumerate(out.split(counts))])

    def _dropped(self, out: Tensor) -> Tensor:
        return F.dropout(out, self.dropout, self.training)

    def _normed(self, out: Tensor, expert: int) -> Tensor:
        return F.layer_norm(
            out, out.shape[-1:], self.norm_weight[expert], self.norm_bias[expert], self.epsilon
        )
