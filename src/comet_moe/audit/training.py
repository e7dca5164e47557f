"""What a training step would do to the routers: gradients, and the auxiliary losses that reach the total.

Nothing is changed: gradients are not stored, buffers and modes are restored.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe.audit.thresholds import AUX_GRADIENT
from comet_moe.exceptions import RoutingWarning
from comet_moe.gates.losses import load_balancing_loss
from comet_moe.interventions import Loss
from comet_moe.mixture.visits import Call, Mixture, RoutedExperts, visiting
from comet_moe.monitor import RoutingMonitor
from comet_moe.routing import Routing

Total = Callable[[Any, Any], Tensor]
"""``total(model, batch)``: the scalar that training minimises, auxiliary losses included."""

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


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards modes are as before."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


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


@dataclass(frozen=True)
class AuxLosses:
    """The auxiliary losses of a model, over all batches.

    Attributes:
        sources: which: "router_aux_loss_coef" of transformers' configuration, "gates" of this library.
        expected: their mean by definition.
        added: mean of total less task loss.
        ratio: how many times the total has them, from gradients into the routers. With g by definition and
            a of what is added it is a · g / g · g. Where g is rounding, as with equal loads, it is added /
            expected.
    """

    sources: list[str]
    expected: float
    added: float
    ratio: float


def measure_aux_losses(
    model: nn.Module,
    mixtures: Sequence[Mixture],
    batches: Sequence[Any],
    loss: Loss,
    total: Total | None,
    seed: int,
) -> AuxLosses | None:
    r"""The auxiliary losses by their definition, against what the training loss has beyond the task's.

    The definition for routers of transformers is the load-balancing loss of the rows of all layers together,
    times the configuration's ``router_aux_loss_coef``. Gates of this library return theirs. Gradients are
    compared too: a loss on a double softmax has nearly the right value.

    Args:
        total: the training loss. None is ``model(...).loss`` for models of transformers that have such a
            coefficient, as their configuration says.

    Returns:
        None where no auxiliary loss is configured, or where the training loss is not known.
    """
    coefficient = _coefficient(model)
    if total is None and not coefficient:
        return None
    gates = dict.fromkeys(weight for mixture in mixtures for weight in mixture.gate_parameters.values())
    weights = [weight for weight in gates if weight.requires_grad]
    has_gates = total is not None and any(mixture.gate_of_ours for mixture in mixtures)
    expected = added = 0.0
    sums: list[tuple[Tensor, Tensor, Tensor]] = []  # gradients by definition, as added, of the task
    sources: set[str] = set()
    with as_in_training(model, seed), torch.enable_grad():
        for batch in batches:
            routings: list[Routing] = []
            with ExitStack() as stack:
                stack.enter_context(torch.random.fork_rng())  # the second pass draws the same noise
                monitor = stack.enter_context(_monitored(model)) if has_gates else None
                stack.enter_context(visiting(model, mixtures, partial(_keep, routings)))
                task = _task_loss(model, batch) if total is None else loss(model, batch).float().mean()
                by_source = {} if monitor is None else {"gates": monitor.aux_loss}
            if coefficient and routings:
                by_source["router_aux_loss_coef"] = coefficient * load_balancing_loss(routings)
            by_source = {name: value for name, value in by_source.items() if value}
            if not by_source:
                return None
            sources.update(by_source)
            definition = torch.stack(list(by_source.values())).sum()
            value = model(**_inputs(batch)).loss if total is None else total(model, batch)
            expected, added = expected + definition.item(), added + (value - task).item()
            if weights:
                by_task = _gradient(task, weights)
                sums.append((_gradient(definition, weights), _gradient(value, weights) - by_task, by_task))
    if not expected:
        return None
    ratio = added / expected
    if sums:
        wanted, actual, of_task = (torch.stack(own).sum(0) for own in zip(*sums, strict=True))
        if wanted.norm() > AUX_GRADIENT * of_task.norm():
            ratio = float(actual @ wanted / (wanted @ wanted))
    return AuxLosses(sorted(sources), expected / len(batches), added / len(batches), ratio)


@contextmanager
def _monitored(model: nn.Module) -> Iterator[RoutingMonitor]:
    """A monitor for the auxiliary losses of the gates only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoutingWarning)
        with RoutingMonitor(model) as monitor:
            yield monitor


def _keep(routings: list[Routing], mixture: Mixture, call: Call) -> None:
    """Keep the routing of a mixture of transformers, without padding."""
    if isinstance(mixture, RoutedExperts) and call.routing.logits is not None:
        routings.append(call.routing.masked(call.tokens.mask))


def _gradient(value: Tensor, weights: list[nn.Parameter]) -> Tensor:
    """The gradient of ``value`` into all ``weights`` as one vector, in float64; 0 where there is none."""
    if not value.requires_grad:
        gradients: Sequence[Tensor | None] = [None] * len(weights)
    else:
        gradients = torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(weight) if gradient is None else gradient).double().flatten()
            for weight, gradient in zip(weights, gradients, strict=True)
        ]
    )


def _coefficient(model: Any) -> float:
    """The coefficient of the balance loss in a configuration of transformers, 0 without one."""
    config = getattr(model, "config", None)
    text = text_config(config)
    return float(getattr(text, "router_aux_loss_coef", None) or 0.0)


def text_config(config: Any) -> Any:
    """The part of a configuration of transformers that describes the language model."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _task_loss(model: Any, batch: Any) -> Tensor:
    value: Tensor = model(**_inputs(batch), output_router_logits=False).loss
    return value


def _inputs(batch: Any) -> dict[str, Any]:
    """The arguments of a causal language model, with labels."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise ValueError(
            "the batches of a model of transformers must be dictionaries with input_ids, or pass total"
        )
    inputs = {name: value for name, value in batch.items() if name != "groups"}
    if "labels" not in inputs:
        labels, mask = inputs["input_ids"], inputs.get("attention_mask")
        inputs["labels"] = labels if mask is None else labels.masked_fill(mask == 0, -100)
    return inputs
