"""A gate around another gate."""

import torch
from torch import Tensor

from comet_moe import checks
from comet_moe.gates.base import Gate


class GateWrapper(Gate):
    """Base class of gates that change the routing of another gate; other attributes are those of that gate.

    ``forward`` calls ``self.gate`` and returns a changed routing. As for every gate it gets checked input in
    float32 (float64 if the gate inside is), and autocast is off. Values are checked by the gate inside, once.

    Args:
        gate: the gate inside.

    Example:
        >>> import torch
        >>> from comet_moe import Routing
        >>> from comet_moe.gates import GateWrapper, TopKGate
        >>> class ScaledGate(GateWrapper):
        ...     def forward(self, x, keys=None, mask=None):
        ...         return self.gate(x / x.norm(dim=-1, keepdim=True), keys=keys, mask=mask)
        >>> gate = ScaledGate(TopKGate(in_features=8, num_experts=6, k=2))
        >>> gate(torch.randn(3, 8)).weights.count_nonzero(-1)
        tensor([2, 2, 2])
    """

    checks_values = True

    def __init__(self, gate: Gate):
        super().__init__()
        checks.require_type("gate", gate, Gate)
        self.gate = gate
        self.num_experts = gate.num_experts
        self.in_features = gate.in_features
        self.k = gate.k
        self.sums_to_one = gate.sums_to_one
        self.max_weight_sum = gate.max_weight_sum
        self.stochastic = gate.stochastic
        self.has_logits = gate.has_logits
        self.has_trees = gate.has_trees
        self.depends_on_batch = gate.depends_on_batch

    @property
    def soft_in_training(self) -> bool:  # type: ignore[override]
        """The attribute of the gate inside."""
        return self.gate.soft_in_training

    @property
    def keeps_contributions(self) -> bool:
        """The attribute of the gate inside; setting it here sets it there."""
        return self.gate.keeps_contributions

    @keeps_contributions.setter
    def keeps_contributions(self, keeps: bool) -> None:
        self.gate.keeps_contributions = keeps

    def flops(self) -> int:
        """Operations of the gate inside."""
        return self.gate.flops()

    def idle_parameters(self) -> set[str]:
        """Idle parameters of the gate inside."""
        return {f"gate.{name}" for name in self.gate.idle_parameters()}

    def _parameter_dtype(self, x: Tensor) -> torch.dtype:
        return self.gate._parameter_dtype(x)
