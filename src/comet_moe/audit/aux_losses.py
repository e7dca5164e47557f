"""Which auxiliary losses reach the training loss, and whether they equal their definition.

The definition for routers of transformers is the load-balancing loss of the rows of all layers together,
times the configuration's ``router_aux_loss_coef``. Gates of this library return theirs. Values and gradients
are compared: a loss on a double softmax has nearly the right value.

Shapes: S sources, P parameters of all routers.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe.audit.thresholds import AUX_GRADIENT
from comet_moe.audit.training import as_in_training, text_config
from comet_moe.exceptions import RoutingWarning
from comet_moe.gates.losses import load_balancing_loss
from comet_moe.interventions import Loss
from comet_moe.mixture.visits import Call, Mixture, RoutedExperts, visiting
from comet_moe.monitor import RoutingMonitor
from comet_moe.routing import Routing

Total = Callable[[Any, Any], Tensor]
"""``total(model, batch)``: the scalar that training minimises, auxiliary losses included."""

COEFFICIENT = "router_aux_loss_coef"
GATES = "gates"
"""The two sources: transformers' configuration, and the gates of this library."""


@dataclass(frozen=True)
class AuxLoss:
    """An auxiliary loss of a model, over all batches.

    Attributes:
        source: :data:`COEFFICIENT` or :data:`GATES`.
        expected: its mean by definition.
        added: the mean of what the total has of it: total less the task's loss, less the other source.
        ratio: how many times the total has it.
    """

    source: str
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
) -> list[AuxLoss]:
    """The auxiliary losses by their definition, against what the training loss has beyond the task's.

    Args:
        total: the training loss. None is ``model(...).loss`` for models of transformers that have such a
            coefficient, as their configuration says.

    Returns:
        None of those that are not configured; none at all where the training loss is not known, or where no
        router has parameters that train.
    """
    coefficient = 0.0 if total is None and not _has_loss(model) else _coefficient(model)
    sources = [COEFFICIENT] if coefficient else []
    if total is not None and any(mixture.library_gate for mixture in mixtures):
        sources.append(GATES)
    gates = dict.fromkeys(weight for mixture in mixtures for weight in mixture.gate_parameters.values())
    weights = [weight for weight in gates if weight.requires_grad]
    if not sources or not weights:
        return []
    k = getattr(text_config(getattr(model, "config", None)), "num_experts_per_tok", None)
    expected, added = torch.zeros(len(sources), dtype=torch.float64), 0.0
    wanted, actual, of_task = [], [], []  # gradients into the routers
    with as_in_training(model, seed), torch.enable_grad():
        for batch in batches:
            routings: list[Routing] = []
            with ExitStack() as stack:
                stack.enter_context(torch.random.fork_rng())  # the second pass draws the same noise
                monitor = stack.enter_context(_monitored(model)) if GATES in sources else None
                stack.enter_context(visiting(model, mixtures, partial(_keep, routings, k)))
                task = _task_loss(model, batch) if total is None else loss(model, batch).float().mean()
                own = {} if monitor is None else {GATES: monitor.aux_loss}
            own[COEFFICIENT] = coefficient * load_balancing_loss(routings) if routings else task.new_zeros(())
            definitions = [own[source] for source in sources]
            value = model(**_inputs(batch)).loss if total is None else total(model, batch)
            expected += torch.stack([one.detach().double().cpu() for one in definitions])
            added += (value - task).item()
            by_task = _gradient(task, weights)
            wanted.append(torch.stack([_gradient(one, weights) for one in definitions]))
            actual.append(_gradient(value, weights) - by_task)
            of_task.append(by_task)
    expected, added = expected / len(batches), added / len(batches)
    ratios = torch.full((len(sources),), torch.nan, dtype=torch.float64)
    wanted_sum = torch.stack(wanted).sum(0)  # (S, P)
    is_clear = wanted_sum.norm(dim=1) > AUX_GRADIENT * torch.stack(of_task).sum(0).norm()
    is_clear = is_clear.cpu() & (expected != 0)
    if is_clear.any():
        ratios[is_clear] = _multiples(wanted_sum[is_clear], torch.stack(actual).sum(0))
    return list(_describe(sources, expected, added, ratios))


def _multiples(wanted: Tensor, actual: Tensor) -> Tensor:
    """c (S,), for which Σ_s c_s wanted_s is nearest to ``actual``: (S, P), (P,)."""
    return torch.linalg.lstsq(wanted.mT.cpu(), actual.cpu().unsqueeze(1), driver="gelsd").solution[:, 0]


def _describe(sources: list[str], expected: Tensor, added: float, ratios: Tensor) -> Iterator[AuxLoss]:
    """The losses that are not 0. Where a gradient is rounding, as with equal loads, values decide."""
    rest = added - float((expected * ratios).nansum())
    unclear = float(expected[ratios.isnan()].sum())
    for source, one, ratio in zip(sources, expected.tolist(), ratios.tolist(), strict=True):
        if one:
            ratio = rest / unclear if ratio != ratio else ratio
            yield AuxLoss(source, one, added if len(sources) == 1 else ratio * one, ratio)


@contextmanager
def _monitored(model: nn.Module) -> Iterator[RoutingMonitor]:
    """A monitor for the auxiliary losses of the gates only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoutingWarning)
        with RoutingMonitor(model) as monitor:
            yield monitor


def _keep(routings: list[Routing], k: int | None, mixture: Mixture, call: Call) -> None:
    """Keep the routing of a mixture of transformers, without padding.

    The experts are those of the k largest logits, as in ``load_balancing_loss_func`` of transformers. That is
    so also where the router chooses by something else, such as logits with a bias.
    """
    logits = call.routing.logits
    if isinstance(mixture, RoutedExperts) and logits is not None:
        selected = logits.topk(k or int(call.routing.weights.count_nonzero(-1).max())).indices
        weights = torch.zeros_like(logits).scatter(-1, selected, 1.0)
        routings.append(Routing(weights=weights, logits=logits).masked(call.tokens.mask))


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
    return float(getattr(text, COEFFICIENT, None) or 0.0)


def _has_loss(model: nn.Module) -> bool:
    """Whether it is a model of transformers that computes a loss, which has a head."""
    return "labels" in inspect.signature(type(model).forward).parameters


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
