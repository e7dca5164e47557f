"""The dense gate: every expert, weighted by a softmax."""

from torch import Tensor

from comet_moe.gates.base import LinearGate
from comet_moe.gates.registry import Positive, register_gate
from comet_moe.routing import Routing


@register_gate("softmax")
class SoftmaxGate(LinearGate):
    r"""All experts, weighted by a softmax (MMoE).

    .. math:: g(x)_i = \mathrm{scale} \cdot \frac{\exp(w_i^T x + b_i)}{\sum_j \exp(w_j^T x + b_j)}

    Args:
        in_features: p.
        num_experts: n.
        scale: factor on the weights.

    Attributes:
        weight, bias: (n, p), (n,), Glorot-uniform and zero at the start.

    Example:
        >>> import torch
        >>> from comet_moe.gates import SoftmaxGate
        >>> gate = SoftmaxGate(in_features=32, num_experts=6)
        >>> routing = gate(torch.randn(4, 32))
        >>> routing.weights.count_nonzero(-1)
        tensor([6, 6, 6, 6])
        >>> bool(torch.equal(routing.logits.softmax(-1), routing.weights))
        True
    """

    def __init__(self, in_features: int, num_experts: int, scale: Positive = 1.0):
        super().__init__(in_features, num_experts)
        self._set_scale(scale)
        self.reset_parameters()

    def idle_parameters(self) -> set[str]:
        """All parameters if there is one expert."""
        return {"weight", "bias"} if self.num_experts == 1 else set()

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """One linear map and a softmax."""
        logits = self._logits(x)
        return Routing(weights=self._scaled(logits.softmax(-1)), logits=logits)
