"""A gate with auxiliary losses that balance it."""

from torch import Tensor

from comet_moe.gates.base import Gate, GateWrapper
from comet_moe.gates.losses import Regularizer
from comet_moe.routing import Routing


class RegularizedGate(GateWrapper):
    """Adds to the auxiliary loss of ``gate``, in training, losses that spread rows over the experts.

    Under local search it belongs inside, ``PermutedGate(RegularizedGate(gate, ...), search)``: a permutation
    does not change how even the loads are. One loss over the gates of several tasks together is
    ``MultiGateMoE(regularizer=Regularizer(...))``.

    Args:
        gate: any gate.
        load_balance: weight of :func:`~comet_moe.gates.losses.load_balancing_loss`; 0.01 is usual.
        z_loss: weight of :func:`~comet_moe.gates.losses.z_loss`; 0.001 is usual.
        information: weight of :func:`~comet_moe.gates.losses.information_loss`. For a gate with trees it is
            meant in place of their entropy loss.

    Example:
        >>> import torch
        >>> from comet_moe.gates import RegularizedGate, TopKGate
        >>> gate = RegularizedGate(TopKGate(in_features=8, num_experts=6, k=2), load_balance=0.01)
        >>> round(gate(torch.zeros(4, 8)).aux_loss.item(), 4)  # equal probabilities: 0.01 · k
        0.02
    """

    def __init__(self, gate: Gate, load_balance: float = 0.0, z_loss: float = 0.0, information: float = 0.0):
        super().__init__(gate)
        self.regularizer = Regularizer(load_balance, z_loss, information)
        if z_loss and gate.has_logits is False:
            raise ValueError(
                f"z_loss is {z_loss:g}, and {type(gate).__name__} has no router logits: set z_loss to 0"
            )

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Route ``x`` (B, ..., p) by the gate inside; in training with the losses added."""
        routing = self.gate(x, keys=keys, mask=mask)
        if not (self.training and self.regularizer):
            return routing
        return routing.with_aux_loss(routing.aux_loss + self.regularizer(routing, self.ranks))

    def extra_repr(self) -> str:
        """Shown in ``repr(gate)``."""
        losses = vars(self.regularizer)
        return ", ".join(f"{name}={weight:g}" for name, weight in losses.items() if weight)
