"""Experts of dense layers: one as in recommenders, two as in transformers, or any number as for tables."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe.experts.base import Experts
from comet_moe.experts.grouped_linear import GroupedLinear
from comet_moe.kernels.mix import Epilogue
from comet_moe.kernels.neurons import ACTIVATIONS
from comet_moe.kernels.swiglu import swiglu

Activation = Callable[[Tensor], Tensor]
Apply = Callable[[GroupedLinear, Tensor], Tensor]


class LayeredExperts(Experts):
    """Experts of dense layers, each with activation and dropout; ReLU and dropout of the last while mixing.

    Args:
        num_experts: n.
        activation: a name in ``functions``.
        dropout: probability of a zero in training.
        functions: the elementwise functions by name.
    """

    takes_offsets = True

    def __init__(
        self,
        num_experts: int,
        activation: str,
        dropout: float,
        functions: Mapping[str, Activation] = ACTIVATIONS,
    ):
        super().__init__()
        if not isinstance(activation, str) or activation not in functions:
            raise ValueError(f"activation must be one of {', '.join(functions)}, got {activation!r}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
        self.num_experts = num_experts
        self.activation = activation
        self._activation = functions[activation]
        self.dropout = dropout

    @abstractmethod
    def _layers(self) -> list[GroupedLinear]:
        """The layers, first to last."""

    def flops(self) -> int:
        """Floating-point operations of all layers on one row."""
        return sum(layer.flops() for layer in self._layers())

    @property
    def epilogue(self) -> Epilogue:
        """ReLU and dropout of the last layer are applied while mixing; other activations before."""
        return Epilogue(self.activation == "relu", self.dropout if self.training else 0.0)

    def dense(self, x: Tensor) -> Tensor:
        """(B, p) -> (B, n, u)."""
        return self._run(x, lambda layer, rows: layer.each(rows), lambda layer, rows: layer.shared(rows))

    def one(self, rows: Tensor, expert: int) -> Tensor:
        """(m, p) -> (m, u)."""
        return self._run(rows, lambda layer, hidden: layer.one(hidden, expert))

    def sparse(self, rows: Tensor, counts: list[int]) -> Tensor:
        """(M, p) -> (M, u)."""
        return self._run(rows, lambda layer, hidden: layer.grouped(hidden, counts))

    def sorted_rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """(M, p) -> (M, u)."""
        return self._run(rows, lambda layer, hidden: layer.sorted_rows(hidden, offsets))

    def _run(self, rows: Tensor, apply: Apply, apply_first: Apply | None = None) -> Tensor:
        """All layers by ``apply``, the first one by ``apply_first``, without what the epilogue does."""
        first, *others = self._layers()
        hidden = (apply_first or apply)(first, rows)
        for layer in others:
            hidden = apply(layer, F.dropout(self._activation(hidden), self.dropout, self.training))
        return hidden if self.activation == "relu" else self._activation(hidden)


class DenseExperts(LayeredExperts):
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

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        activation: str = "relu",
        dropout: float = 0.0,
    ):
        super().__init__(num_experts, activation, dropout)
        self.out_features = out_features
        self.linear = GroupedLinear(num_experts, in_features, out_features)

    def _layers(self) -> list[GroupedLinear]:
        return [self.linear]


class FeedForwardExperts(LayeredExperts):
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

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: str = "gelu",
        dropout: float = 0.0,
    ):
        super().__init__(num_experts, activation, dropout, ACTIVATIONS | {"swiglu": swiglu})
        is_gated = activation == "swiglu"
        self.inner = GroupedLinear(num_experts, in_features, hidden_features * (2 if is_gated else 1))
        self.out_features = in_features if out_features is None else out_features
        self.outer = GroupedLinear(num_experts, hidden_features, self.out_features)

    @property
    def epilogue(self) -> Epilogue:
        """Dropout is applied while mixing."""
        return Epilogue(dropout=self.dropout if self.training else 0.0)

    def _layers(self) -> list[GroupedLinear]:
        return [self.inner, self.outer]

    def _run(self, rows: Tensor, apply: Apply, apply_first: Apply | None = None) -> Tensor:
        return apply(self.outer, self._activation((apply_first or apply)(self.inner, rows)))


class MLPExperts(LayeredExperts):
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

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        units: Sequence[int],
        activation: str = "relu",
        dropout: float = 0.0,
    ):
        super().__init__(num_experts, activation, dropout)
        if not units:
            raise ValueError("units must be the width of at least 1 layer, got none")
        self.out_features = units[-1]
        self.layers = nn.ModuleList(
            GroupedLinear(num_experts, before, after) for before, after in pairwise([in_features, *units])
        )

    def _layers(self) -> list[GroupedLinear]:
        return cast(list[GroupedLinear], list(self.layers))  # or what wraps one
