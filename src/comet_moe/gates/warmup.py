"""A gate that starts dense and ends sparse."""

import torch
from torch import Tensor, nn

from comet_moe import checks
from comet_moe.gates.base import Gate, GateWrapper
from comet_moe.routing import Routing
from comet_moe.stepping import Stepped


class WarmupGate(GateWrapper, Stepped):
    r"""Equal weights at first, those of ``gate`` after ``steps`` optimiser steps; t of them are done.

    .. math:: g_{\mathrm{warm}}(x)_i = (1 - s) \, g(x)_i + \frac{s c}{n}, \qquad
        s = \max(1 - \frac{t}{\mathrm{steps}}, 0)

    c is the sum of the weights of ``gate``, at most: 1, or the ``scale`` of a scaled gate.

    While s > 0 every row trains every expert. From then on the routing is that of ``gate``, and a mixture
    with ``execution="auto"`` runs sparse. Evaluation always uses ``gate`` alone. Call
    :func:`comet_moe.step` after each optimiser step.

    Args:
        gate: any gate.
        steps: optimiser steps until the gate is itself.

    Attributes:
        progress: (), the number of optimiser steps so far.
        warming: whether training still mixes in all experts.

    Example:
        >>> import torch, comet_moe
        >>> from comet_moe.gates import HashGate, WarmupGate
        >>> gate = WarmupGate(HashGate(num_keys=9, num_experts=4), steps=2)
        >>> x, keys = torch.randn(1, 8), torch.tensor([5])
        >>> for _ in range(3):
        ...     print(gate(x, keys=keys).weights.amax().item())
        ...     comet_moe.step(gate)
        0.25
        0.625
        1.0
    """

    progress: Tensor

    def __init__(self, gate: Gate, steps: int):
        super().__init__(gate)
        self.steps = checks.at_least_one("steps", steps)
        self.register_buffer("progress", torch.empty((), dtype=torch.int64))
        self.reset_parameters()
        self._remember_progress(0)

    def reset_parameters(self) -> None:
        """No steps so far; those of the gate inside are its own."""
        nn.init.zeros_(self.progress)

    @property
    def warming(self) -> bool:
        """Whether training still mixes in all experts.

        The buffer is read only after someone else has changed it, since an accelerator waits for a read. A
        graph depends on whether the warm-up is over, and not on the number of steps.
        """
        if not torch.compiler.is_compiling():
            buffer = self.progress
            is_known = buffer is self._known_buffer and self._known_version == _version(buffer)
            if not is_known and checks.is_plain_eager(buffer) and not buffer.is_meta:
                self._remember_progress(int(buffer))
        return not self._is_over

    def _remember_progress(self, steps: int) -> None:
        self._known_buffer, self._known_version = self.progress, _version(self.progress)
        self._known_steps, self._is_over = steps, steps >= self.steps

    @property
    def soft_in_training(self) -> bool:  # type: ignore[override]
        """While warming, training mixes all experts and evaluation does not."""
        return self.gate.soft_in_training or self.warming

    def step(self) -> None:
        """Count one optimiser step."""
        if self.warming:
            self.progress.add_(1)
            self._remember_progress(self._known_steps + 1)

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Route ``x`` (B, ..., p) by the gate inside, mixed with equal weights in training."""
        routing = self.gate(x, keys=keys, mask=mask)
        if not (self.training and self.warming):
            return routing
        weights, contributions = routing.weights, routing.contributions
        uniform = (1 - self.progress / self.steps).to(weights.dtype)  # s; no synchronisation
        total = uniform if self.sums_to_one else uniform * (self.max_weight_sum or 1.0)
        if contributions is not None:
            share = total / contributions.shape[-2:].numel()
            contributions = contributions * (1 - uniform) + share
        mixed = weights * (1 - uniform) + total / self.num_experts
        return routing.with_weights(mixed, contributions)

    def extra_repr(self) -> str:
        """Shown in ``repr(gate)``."""
        return f"steps={self.steps}"


def _version(buffer: Tensor) -> int | None:
    """How often ``buffer`` was changed in place; None in inference mode, where torch does not count."""
    return None if buffer.is_inference() else buffer._version
