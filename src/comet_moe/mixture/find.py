"""Finds the gates of a model."""

from collections.abc import Iterator

from torch import nn

from comet_moe.gates.base import Gate
from comet_moe.mixture.moe import MultiGateMoE


def outermost_gates(model: nn.Module) -> Iterator[tuple[str, Gate, MultiGateMoE | None]]:
    """Gates that are not inside another gate, each once: name in the model, gate, and a mixture.

    The mixture is None unless it has a joint choice or joint losses. In that case only the mixture has the
    final routings.
    """
    seen: set[nn.Module] = set()

    def walk(
        module: nn.Module, name: str, mixture: MultiGateMoE | None
    ) -> Iterator[tuple[str, Gate, MultiGateMoE | None]]:
        if module in seen:
            return
        seen.add(module)
        if isinstance(module, Gate):
            yield name or "gate", module, mixture
            return
        for child_name, child in module.named_children():
            child_mixture = mixture
            if isinstance(module, MultiGateMoE):
                is_joint = module.joint is not None or module.regularizer is not None
                child_mixture = module if is_joint and child is module.gates else None
            yield from walk(child, f"{name}.{child_name}" if name else child_name, child_mixture)

    return walk(model, "", None)
