"""The experts of a sparse BERT: feed-forward layers, each with a residual connection and a LayerNorm."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe.experts import Experts
from comet_moe.experts.grouped_linear import GroupedLinear


class BertExperts(Experts):
    """f_e(x) = LayerNorm_e(dropout(B_e activation(A_e x + a_e) + b_e) + x), as in MoEBERT.

    The mixture weights the outputs of the LayerNorms.

    Args:
        num_experts: E.
        features: p.
        neurons: number of neurons per expert.
        activation: elementwise function between the two layers.
        dropout: probability of a zero in training.
        epsilon: added to the variance in LayerNorm.

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
        """Floating-point operations per row and expert, of both layers."""
        return self.inner.flops() + self.outer.flops()

    def dense(self, x: Tensor) -> Tensor:
        """(B, p) -> (B, E, p)."""
        out = self._dropout(self.outer.each(self.activation(self.inner.shared(x)))) + x.unsqueeze(1)
        return F.layer_norm(out, out.shape[-1:], eps=self.epsilon) * self.norm_weight + self.norm_bias

    def one(self, rows: Tensor, expert: int) -> Tensor:
        """(m, p) -> (m, p)."""
        hidden = self.activation(self.inner.one(rows, expert))
        return self._norm(self._dropout(self.outer.one(hidden, expert)) + rows, expert)

    def sparse(self, rows: Tensor, counts: list[int]) -> Tensor:
        """(M, p) -> (M, p)."""
        hidden = self.activation(self.inner.grouped(rows, counts))
        out = self._dropout(self.outer.grouped(hidden, counts)) + rows
        return torch.cat([self._norm(part, expert) for expert, part in enumerate(out.split(counts))])

    def _dropout(self, out: Tensor) -> Tensor:
        return F.dropout(out, self.dropout, self.training)

    def _norm(self, out: Tensor, expert: int) -> Tensor:
        return F.layer_norm(
            out, out.shape[-1:], self.norm_weight[expert], self.norm_bias[expert], self.epsilon
        )
