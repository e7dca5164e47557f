"""The recommenders' expert: a dense layer with activation and dropout."""

from torch import Tensor
from torch.nn import functional as F

from comet_moe.experts.base import Experts, activation_named
from comet_moe.experts.grouped_linear import GroupedLinear


class DenseExperts(Experts):
    """f_e(x) = dropout(activation(W_e x + b_e)).

    Args:
        num_experts: n.
        in_features: p.
        out_features: u.
        activation: "relu", "gelu", "silu", "tanh" or "identity".
        dropout: probability of a zero in training.
    """

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
        self._activation = activation_named(activation)
        self.dropout = probability(dropout)

    def dense(self, x: Tensor) -> Tensor:
        """(B, p) -> (B, n, u)."""
        return self._finish(self.linear.shared(x))

    def sparse(self, x: Tensor, sample: Tensor, counts: list[int]) -> Tensor:
        """(B, p), (M,) -> (M, u)."""
        return self._finish(self.linear.grouped(x[sample], counts))

    def _finish(self, hidden: Tensor) -> Tensor:
        return F.dropout(self._activation(hidden), self.dropout, self.training)


def probability(dropout: float) -> float:
    """``dropout`` if it is in [0, 1)."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    return dropout
