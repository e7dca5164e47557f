"""The gradient of the task's loss into each router and its experts, as a training step would have it.

Nothing is changed: gradients are not stored, buffers and modes are restored.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe.interventions import Loss
from comet_moe.mixture.visits import Mixture

_STILL = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)


@contextmanager
def as_in_training(model: nn.Module, seed: int) -> Iterator[None]:
    """Training mode without dropout; afterwards modes, buffers and the random state are as before."""
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.train()
        for module in modes:
            if isinstance(module, _STILL):
                module.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            own = dict(model.named_buffers())
            with torch.no_grad():
                for name, buffer in buffers.items():
                    own[name].copy_(buffer)


@dataclass(frozen=True)
class GradientNorms:
    """Euclidean norms of the mean gradient of the task's loss; None where there are no such parameters.

    Attributes:
        router, experts: the norms.
        is_frozen: whether no parameter of the router is trained (``requires_grad``).
    """

    router: float | None
    experts: float | None
    is_frozen: bool

    @property
    def ratio(self) -> float | None:
        """router / experts."""
        if self.router is None or not self.experts:
            return None
        return self.router / self.experts


def measure_gradients(
    model: nn.Module, mixtures: Sequence[Mixture], batches: Sequence[Any], loss: Loss, seed: int
) -> dict[str, GradientNorms]:
    """The gradient of the mean loss of ``batches`` into each router and its experts."""
    parts = {
        mixture.name: (list(mixture.gate_parameters.values()), list(mixture.expert_parameters.values()))
        for mixture in mixtures
    }
    unique = dict.fromkeys(parameter for pair in parts.values() for own in pair for parameter in own)
    parameters = [parameter for parameter in unique if parameter.is_floating_point()]
    was_trained = {parameter: parameter.requires_grad for parameter in parameters}
    sums: dict[nn.Parameter, Tensor] = {}
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        with as_in_training(model, seed), torch.enable_grad():
            for batch in batches:
                value = torch.as_tensor(loss(model, batch)).float().mean() / len(batches)
                gradients = torch.autograd.grad(value, parameters, allow_unused=True)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
    finally:
        for parameter, trained in was_trained.items():
            parameter.requires_grad_(trained)

    def norm(own: list[nn.Parameter]) -> float | None:
        if not own:
            return None
        squares = [float(sums[parameter].double().square().sum()) for parameter in own if parameter in sums]
        return float(sum(squares)) ** 0.5

    return {
        name: GradientNorms(
            norm(gate),
            norm(experts),
            bool(gate) and not any(was_trained.get(parameter, False) for parameter in gate),
        )
        for name, (gate, experts) in parts.items()
    }


def text_config(config: Any) -> Any:
    """The part of a configuration of transformers that describes the language model."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config
