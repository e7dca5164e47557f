"""A gate over some of the experts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from comet_moe import checks
from comet_moe.gates.base import Gate, GateWrapper
from comet_moe.routing import Routing


class SubsetGate(GateWrapper):
    """Sends output i of ``gate`` to expert experts[i] of n; the other experts get weight 0.

    With one such gate per task, experts are private to a task or shared by several.

    Args:
        gate: any gate over ``len(experts)`` experts.
        experts: their indices, each once.
        num_experts: n.

    Example:
        >>> import torch
        >>> from comet_moe.gates import SoftmaxGate, SubsetGate
        >>> gate = SubsetGate(SoftmaxGate(in_features=8, num_experts=2), experts=[0, 3], num_experts=4)
        >>> gate(torch.zeros(1, 8)).weights.detach()
        tensor([[0.5000, 0.0000, 0.0000, 0.5000]])
    """

    experts: Tensor

    def __init__(self, gate: Gate, experts: Sequence[int], num_experts: int):
        super().__init__(gate)
        self.num_experts = checks.at_least_one("num_experts", num_experts)
        if isinstance(experts, int | str) or not all(hasattr(expert, "__index__") for expert in experts):
            raise ValueError(f"experts must be indices of experts, got {experts!r}")
        outside = [expert for expert in experts if not 0 <= expert < num_experts]
        if outside:
            raise ValueError(f"experts must be in 0..{num_experts - 1}, got {outside[0]}")
        if len(set(experts)) != len(experts):
            raise ValueError(f"experts must be different, got {list(experts)}")
        if len(experts) != gate.num_experts:
            raise ValueError(
                f"the gate chooses among {gate.num_experts} experts, but experts has {len(experts)} indices"
            )
        self.register_buffer("experts", torch.tensor(list(experts)), persistent=False)

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Route ``x`` (B, ..., p) by the gate inside, then renumber its experts."""
        return self.gate(x, keys=keys, mask=mask).embedded(self.experts, self.num_experts)

    def extra_repr(self) -> str:
        """Shown in ``repr(gate)``."""
        return f"experts={self.experts.tolist()}, num_experts={self.num_experts}"
