"""No gate at all: every expert with the same weight."""

from torch import Tensor

from comet_moe import checks
from comet_moe.gates.base import Gate
from comet_moe.routing import Routing


class UniformGate(Gate):
    """g(x)_i = 1/n, without parameters. With one expert a mixture is a plain network.

    Args:
        num_experts: n.

    Example:
        >>> import torch
        >>> from comet_moe.gates import UniformGate
        >>> UniformGate(2)(torch.randn(1, 8)).weights
        tensor([[0.5000, 0.5000]])
    """

    has_logits = False

    def __init__(self, num_experts: int):
        super().__init__()
        self.num_experts = checks.at_least_one("num_experts", num_experts)

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Equal weights for every row of ``x`` (B, ..., p)."""
        return Routing(weights=x.new_full((*x.shape[:-1], self.num_experts), 1 / self.num_experts))

    def extra_repr(self) -> str:
        """Shown in ``repr(gate)``."""
        return f"num_experts={self.num_experts}"
