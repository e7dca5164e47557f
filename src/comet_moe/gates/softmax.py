"""The dense gate: every expert, weighted by a softmax."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe.gates.base import TrainableGate
from comet_moe.routing import Routing


class SoftmaxGate(TrainableGate):
    """g(x) = softmax(Wx + b).

    Args:
        in_features: p.
        num_experts: n.

    Attributes:
        weight, bias: (n, p), (n,), Glorot-uniform and zero at the start.
    """

    def __init__(self, in_features: int, num_experts: int):
        super().__init__(in_features, num_experts)
        self.weight = nn.Parameter(torch.empty(num_experts, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot-uniform weight, zero bias."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def flops(self) -> int:
        """Of one logit an expert, for one row."""
        return 2 * self.in_features * self.num_experts

    def idle_parameters(self) -> set[str]:
        """With one expert there is nothing to decide."""
        return {"weight", "bias"} if self.num_experts == 1 else set()

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """One linear map and a softmax."""
        weights = F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)).softmax(-1)
        return Routing(weights=weights)
