"""Experts of one or several dense layers, as in multi-task networks for tables."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe.experts.base import Experts, get_activation
from comet_moe.experts.dense_layer import check_probability
from comet_moe.experts.grouped_linear import GroupedLinear
from comet_moe.kernels.mix import Epilogue


class MLPExperts(Experts):
    """f_e(x) = h_L with h_0 = x and h_l = dropout(activation(W_{e,l} h_{l-1} + b_{e,l})).

    With one layer they equal :class:`DenseExperts`.

    Args:
        num_experts: n.
        in_features: p.
        units: outputs of each layer; the last is u.
        activation: "relu", "gelu", "silu", "tanh" or "identity", after every layer.
        dropout: probability of a zero in training, after every layer.

    Example:
        >>> import torch
        >>> from comet_moe.experts import MLPExperts
        >>> experts = MLPExperts(num_experts=8, in_features=32, units=(64, 16))
        >>> experts.dense(torch.randn(5, 32)).shape
        torch.Size([5, 8, 16])
    """

    takes_offsets = True

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        units: Sequence[int],
        activation: str = "relu",
        dropout: float = 0.0,
    ):
        super().__init__()
        if not units:
            raise ValueError("units must be the width of at least 1 layer, got none")
        self.num_experts = num_experts
        self.out_features = units[-1]
        widths = [in_features, *units]
        self.layers = nn.ModuleList(
            GroupedLinear(num_experts, before, after) for before, after in pairwise(widths)
        )
        self.activation = activation
        self._activation = get_activation(activation)
        self.dropout = check_probability(dropout)

    def flops(self) -> int:
        """Floating-point operations of all layers on one row."""
        return sum(layer.flops() for layer in self._layers())

    @property
    def epilogue(self) -> Epilogue:
        """ReLU and dropout of the last layer are applied while mixing; other activations before."""
        return Epilogue(self.activation == "relu", self.dropout if self.training else 0.0)

    def dense(self, x: Tensor) -> Tensor:
        """(B, p) -> (B, n, u)."""
        first, *others = self._layers()
        hidden = first.shared(x)
        for layer in others:
            hidden = layer.each(self._between(hidden))
        return self._last(hidden)

    def one(self, rows: Tensor, expert: int) -> Tensor:
        """(m, p) -> (m, u)."""
        first, *others = self._layers()
        hidden = first.one(rows, expert)
        for layer in others:
            hidden = layer.one(self._between(hidden), expert)
        return self._last(hidden)

    def sparse(self, rows: Tensor, counts: list[int]) -> Tensor:
        """(M, p) -> (M, u)."""
        first, *others = self._layers()
        hidden = first.grouped(rows, counts)
        for layer in others:
            hidden = layer.grouped(self._between(hidden), counts)
        return self._last(hidden)

    def sorted_rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """(M, p) -> (M, u)."""
        first, *others = self._layers()
        hidden = first.sorted_rows(rows, offsets)
        for layer in others:
            hidden = layer.sorted_rows(self._between(hidden), offsets)
        return self._last(hidden)

    def _layers(self) -> list[GroupedLinear]:
        return [layer for layer in self.layers if isinstance(layer, GroupedLinear)]

    def _between(self, hidden: Tensor) -> Tensor:
        return F.dropout(self._activation(hidden), self.dropout, self.training)

    def _last(self, hidden: Tensor) -> Tensor:
        return hidden if self.activation == "relu" else self._activation(hidden)
