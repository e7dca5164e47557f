"""ReMoE (Wang et al. 2024): weights by ReLU, and an L1 loss that adapts to the wanted number of experts."""

import torch
from torch import Tensor, nn

from comet_moe import checks
from comet_moe.gates.base import LinearGate, SteppedGate
from comet_moe.gates.losses import masked_mean
from comet_moe.gates.ranks import sum_over_ranks
from comet_moe.gates.registry import Positive, Size, register_gate
from comet_moe.routing import Routing

COEFFICIENT_START = 1e-8
COEFFICIENT_FACTOR = 1.2
COEFFICIENT_RANGE = 1e-12, 1.0
"""So that a coefficient which moved one way for long comes back in time. Adam moves the weights no faster for
a larger one. Beyond 1 it only stays large for longer after the target is reached, and switches all off."""


class ReluGate(LinearGate, SteppedGate):
    r"""A ReLU per expert, with a loss that keeps ``target`` of them active (Wang et al. 2024, "ReMoE").

    .. math:: g(x) = \mathrm{scale} \cdot \max(Wx + b, 0), \qquad
        \mathrm{aux\_loss} = \frac{\mathrm{coefficient}}{B} \sum_{b=1}^B \sum_{i=1}^n \max(Wx_b + b, 0)_i

    The weights are differentiable everywhere that matters and need not sum to 1. A row has any number of
    experts from 0 to n, ``target`` on average. After each optimiser step :func:`comet_moe.step` compares the
    rows of the training passes since the last step with it. It multiplies the coefficient by 1.2 if they had
    more active experts, and divides it by 1.2 if they had fewer. The coefficient stays within 1e-12 and 1.
    The mean is over the rows of all ranks.

    Use it where a hard choice of k trains badly and the cost may differ from row to row. The gate starts
    nearly dense and becomes sparse over the first hundred steps or so. A row without any expert gets the
    output 0: keep a residual connection or a shared expert beside the mixture.

    Args:
        in_features: p.
        num_experts: n.
        target: active experts per row, on average; more than n means n.
        scale: factor on the weights.

    Attributes:
        weight: (n, p), Uniform(±sqrt(3 / p) / n) at the start.
        bias: (n,), 1 / n at the start. So for inputs of unit variance each weight is about 1/n ± 1/n. Five
            experts of six are active, and a row sums to about 1.
        coefficient: scalar buffer, 1e-8 at the start.
        active_and_rows: (2,) buffer, active (row, expert) pairs and rows of the training passes since the
            last step, padding left out; not part of the ``state_dict``.

    Example:
        >>> import torch, comet_moe
        >>> from comet_moe.gates import ReluGate
        >>> gate = ReluGate(in_features=32, num_experts=8, target=2)
        >>> routing = gate(torch.randn(100, 32))
        >>> routing.statistics()["experts_per_sample"] > 4
        True
        >>> comet_moe.step(gate)
        >>> round(float(gate.coefficient / 1e-8), 3)
        1.2
    """

    sums_to_one = False
    max_weight_sum = None
    moves_in_training = True
    coefficient: Tensor
    active_and_rows: Tensor

    def __init__(self, in_features: int, num_experts: int, target: int = 1, scale: float = 1.0):
        super().__init__(in_features, num_experts)
        self.scale = checks.positive("scale", scale)
        self.target = min(checks.at_least_one("target", target), num_experts)
        self.register_buffer("coefficient", torch.empty(()))
        self.register_buffer("active_and_rows", torch.empty(2, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small uniform weight, bias 1 / n, coefficient 1e-8."""
        limit = (3 / self.in_features) ** 0.5 / self.num_experts
        nn.init.uniform_(self.weight, -limit, limit)
        nn.init.constant_(self.bias, 1 / self.num_experts)
        nn.init.constant_(self.coefficient, COEFFICIENT_START)
        nn.init.zeros_(self.active_and_rows)

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """One linear map and a ReLU; in training the L1 loss, and active experts are counted."""
        logits = self._logits(x)
        weights = logits.relu()
        if not self.training:
            return Routing(weights=self._scaled(weights), logits=logits)
        self._count(weights.detach(), mask)
        aux_loss = self.coefficient.to(x.dtype) * masked_mean(weights.sum(-1), mask, self.ranks)
        return Routing(weights=self._scaled(weights), aux_loss=aux_loss, logits=logits)

    @torch.no_grad()
    def step(self) -> None:
        """Move the coefficient toward ``target`` active experts per row, by the rows of all ranks."""
        active, rows = sum_over_ranks(self.active_and_rows, self.ranks)
        too_many = (active - self.target * rows).sign()  # -1, 0 or 1
        self.coefficient.mul_(COEFFICIENT_FACTOR**too_many).clamp_(*COEFFICIENT_RANGE)
        self.active_and_rows.zero_()

    def extra_repr(self) -> str:
        """Shown in ``repr(gate)``."""
        return f"{super().extra_repr()}, target={self.target}"

    def _count(self, weights: Tensor, mask: Tensor | None) -> None:
        is_row = torch.ones_like(weights[..., 0], dtype=torch.bool) if mask is None else mask
        active = (weights > 0) & is_row.unsqueeze(-1)
        self.active_and_rows.add_(torch.stack((active.sum(), is_row.sum())))


@register_gate("relu")
def build_relu(in_features: int, num_experts: int, k: Size = 2, scale: Positive = 1.0) -> ReluGate:
    """Positive logits are the weights (ReMoE).

    Args:
        in_features: p.
        num_experts: n.
        k: number of experts per sample that the loss aims at.
        scale: factor on the weights.
    """
    return ReluGate(in_features, num_experts, target=k, scale=scale)
