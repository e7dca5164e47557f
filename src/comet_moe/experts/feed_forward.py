"""Experts of two layers with an activation between them, as in transformers."""

from torch import Tensor

from comet_moe.experts.base import Experts, get_activation
from comet_moe.experts.dense_layer import check_probability
from comet_moe.experts.grouped_linear import GroupedLinear
from comet_moe.kernels.mix import Epilogue
from comet_moe.kernels.swiglu import swiglu


class FeedForwardExperts(Experts):
    """f_e(x) = dropout(B_e activation(A_e x + a_e) + b_e).

    Args:
        num_experts: n.
        in_features: p.
        hidden_features: width between the two layers.
        out_features: u; None means p.
        activation: "gelu", "relu", "silu", "tanh", "identity", or "swiglu". The first layer of "swiglu" is
            twice as wide, and silu(a) · b combines its halves a and b.
        dropout: probability of a zero in training.

    Example:
        >>> import torch
        >>> from comet_moe.experts import FeedForwardExperts
        >>> experts = FeedForwardExperts(num_experts=8, in_features=32, hidden_features=128)
        >>> experts.dense(torch.randn(5, 32)).shape
        torch.Size([5, 8, 32])
    """

    takes_offsets = True

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: str = "gelu",
        dropout: float = 0.0,
    ):
        super().__init__()
        self.num_experts = num_experts
        is_gated = activation == "swiglu"
        self.inner = GroupedLinear(num_experts, in_features, hidden_features * (2 if is_gated else 1))
        self.outer = GroupedLinear(
            num_experts, hidden_features, in_features if out_features is None else out_features
        )
        self.activation = activation
        self._activation = swiglu if is_gated else get_activation(activation)
        self.dropout = check_probability(dropout)

    def flops(self) -> int:
        """Floating-point operations of both layers on one row."""
        return self.inner.flops() + self.outer.flops()

    @property
    def epilogue(self) -> Epilogue:
        """Dropout is applied while mixing."""
        return Epilogue(dropout=self.dropout if self.training else 0.0)

    def dense(self, x: Tensor) -> Tensor:
        """(B, p) -> (B, n, u)."""
        return self.outer.each(self._activation(self.inner.shared(x)))

    def one(self, rows: Tensor, expert: int) -> Tensor:
        """(m, p) -> (m, u)."""
        return self.outer.one(self._activation(self.inner.one(rows, expert)), expert)

    def sparse(self, rows: Tensor, counts: list[int]) -> Tensor:
        """(M, p) -> (M, u)."""
        return self.outer.grouped(self._activation(self.inner.grouped(rows, counts)), counts)

    def sorted_rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """(M, p) -> (M, u)."""
        hidden = self._activation(self.inner.sorted_rows(rows, offsets))
        return self.outer.sorted_rows(hidden, offsets)
