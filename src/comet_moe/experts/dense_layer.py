"""Experts of one dense layer with activation and dropout, as in the paper's recommenders."""

from torch import Tensor

from comet_moe.experts.base import Experts, get_activation
from comet_moe.experts.grouped_linear import GroupedLinear
from comet_moe.kernels.mix import Epilogue


class DenseExperts(Experts):
    """f_e(x) = dropout(activation(W_e x + b_e)).

    Args:
        num_experts: n.
        in_features: p.
        out_features: u.
        activation: "relu", "gelu", "silu", "tanh" or "identity".
        dropout: probability of a zero in training.

    Example:
        >>> import torch
        >>> from comet_moe.experts import DenseExperts
        >>> experts = DenseExperts(num_experts=8, in_features=32, out_features=64)
        >>> experts.dense(torch.randn(5, 32)).shape
        torch.Size([5, 8, 64])
    """

    takes_offsets = True

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        activation: str = "relu",
        dropout: float = 0.0,
    ):
        super().__init__()
        self.num_experts = num_experts
        self.out_features = out_features
        self.linear = GroupedLinear(num_experts, in_features, out_features)
        self.activation = activation
        self._activation = get_activation(activation)
        self.dropout = check_probability(dropout)

    def flops(self) -> int:
        """Floating-point operations of the layer on one row."""
        return self.linear.flops()

    @property
    def epilogue(self) -> Epilogue:
        """ReLU and dropout are applied while mixing; other activations before."""
        return Epilogue(self.activation == "relu", self.dropout if self.training else 0.0)

    def dense(self, x: Tensor) -> Tensor:
        """(B, p) -> (B, n, u)."""
        return self._activated(self.linear.shared(x))

    def one(self, rows: Tensor, expert: int) -> Tensor:
        """(m, p) -> (m, u)."""
        return self._activated(self.linear.one(rows, expert))

    def sparse(self, rows: Tensor, counts: list[int]) -> Tensor:
        """(M, p) -> (M, u)."""
        return self._activated(self.linear.grouped(rows, counts))

    def sorted_rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """(M, p) -> (M, u)."""
        return self._activated(self.linear.sorted_rows(rows, offsets))

    def _activated(self, hidden: Tensor) -> Tensor:
        return hidden if self.activation == "relu" else self._activation(hidden)


def check_probability(dropout: float) -> float:
    """``dropout`` if it is in [0, 1)."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
    return dropout
