"""State that changes with training but not by the optimiser: searches, warm-ups, balancing biases."""

from abc import ABC, abstractmethod

from torch import nn


class Stepped(ABC):
    """Base class of the modules that :func:`step` updates."""

    @abstractmethod
    def step(self) -> None:
        """Count one optimiser step; call it after each one, as for a learning-rate scheduler."""


def step(model: nn.Module) -> None:
    """Advance the schedules and biases in ``model``: call it once after each optimiser step.

    Local searches, warm-ups and the widths of trees follow their schedules. The biases of loss-free balancing
    and the coefficient of ReMoE follow the experts' loads since the last call, balanced trees their rows. A
    module that several gates share advances once.

    Example:
        >>> import torch, comet_moe
        >>> from comet_moe import Permutation, PermutedGate
        >>> from comet_moe.gates import TopKGate
        >>> search = Permutation(num_experts=6, steps=10)
        >>> gate = PermutedGate(TopKGate(in_features=8, num_experts=6, k=2), search)
        >>> optimizer = torch.optim.Adam(gate.parameters())
        >>> optimizer.step()
        >>> comet_moe.step(gate)
        >>> int(search.progress)
        1
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a module, got {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, Stepped):
            module.step()
