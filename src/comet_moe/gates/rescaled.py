"""A gate whose weights sum to 1, for experts that start as copies of one layer."""

from torch import Tensor

from comet_moe.gates.base import Gate, GateWrapper
from comet_moe.routing import Routing


class RescaledGate(GateWrapper):
    """w_i = g_i / Σ_j g_j, where no gradient goes through the sum; a row without experts stays 0.

    Copies of one layer compute what that layer did only if their weights sum to 1. A Top-1 gate that trains
    has a weight below 1. Here its weight is 1, with the gradient of log g_i.

    Args:
        gate: a gate with weights of at least 0.

    Example:
        >>> import torch
        >>> from comet_moe.gates import RescaledGate, TopKGate
        >>> gate = RescaledGate(TopKGate(in_features=8, num_experts=4, k=1, normalize="all"))
        >>> weights = gate(torch.randn(3, 8)).weights
        >>> weights.sum(-1)
        tensor([1., 1., 1.], grad_fn=<SumBackward1>)
    """

    def __init__(self, gate: Gate):
        super().__init__(gate)
        self.sums_to_one = True

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Route ``x`` (B, ..., p) by the gate inside."""
        routing: Routing = self.gate(x, keys=keys, mask=mask)
        total = routing.weights.detach().sum(-1, keepdim=True)
        weights = routing.weights / total.masked_fill(total == 0, 1.0)
        return routing.with_weights(weights, most_experts=routing.most_experts)
