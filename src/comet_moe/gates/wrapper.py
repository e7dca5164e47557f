"""A gate around another gate."""

from torch import nn

from comet_moe.gates.base import Gate


class GateWrapper(Gate):
    """A gate that changes what another one decides, and is like it in all else.

    Args:
        gate: the one inside, which checks its own input.
    """

    __call__ = nn.Module.__call__

    def __init__(self, gate: Gate):
        super().__init__()
        self.gate = gate
        self.num_experts = gate.num_experts
        self.in_features = gate.in_features
        self.k = gate.k
        self.sums_to_one = gate.sums_to_one
        self.stochastic = gate.stochastic

    @property
    def soft_in_training(self) -> bool:  # type: ignore[override]
        """As the gate inside."""
        return self.gate.soft_in_training

    @property
    def keeps_contributions(self) -> bool:
        """As the gate inside, where it is set too."""
        return self.gate.keeps_contributions

    @keeps_contributions.setter
    def keeps_contributions(self, keeps: bool) -> None:
        self.gate.keeps_contributions = keeps

    def flops(self) -> int:
        """Those of the gate inside."""
        return self.gate.flops()

    def idle_parameters(self) -> set[str]:
        """Those of the gate inside."""
        return {f"gate.{name}" for name in self.gate.idle_parameters()}
