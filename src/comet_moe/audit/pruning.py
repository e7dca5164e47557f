"""A mixture with fewer experts: which to keep, the loss without the others, and the smaller model.

The experts with the least mean of weight times norm of the output go (REAP, Lasby et al. 2025). The rows of
the router and of the stacked experts are sliced; the router then chooses among those that are left.

Shapes: N rows, n experts, m of them kept.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe.audit.routes import RouteReader, Routes
from comet_moe.audit.training import text_config
from comet_moe.exceptions import CometError
from comet_moe.gates import TopKGate
from comet_moe.interventions import Loss, collect_losses, evaluating
from comet_moe.mixture.visits import Call, Mixture, RoutedExperts, find_mixtures, visiting
from comet_moe.routes import weigh
from comet_moe.routing import Routing

COUNT_NAMES = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
"""Attributes of modules and configurations of transformers that hold n."""


class WithoutExperts:
    """A visit that lets each mixture choose among some of its experts only, as if it had no others.

    A Top-k gate, or a router that is copied as one, chooses again. With others the weights of a row move to
    the kept experts that the row has, in proportion. A row that has none of them gets all alike.

    Args:
        kept: the experts (m,) that stay, by the name of the mixture.
    """

    def __init__(self, kept: Mapping[str, Tensor]):
        self._kept = kept
        self._gates: dict[str, TopKGate] = {}

    def __call__(self, mixture: Mixture, call: Call) -> Tensor:
        """The other weights (N, n)."""
        weights, logits = call.routing.weights, call.routing.logits
        kept = self._kept[mixture.name].to(weights.device)
        if mixture.equivalent_gate is None or logits is None:
            experts = kept.expand(len(weights), -1)
        else:
            removed = torch.ones(mixture.num_experts, dtype=torch.bool, device=kept.device)
            removed[kept] = False
            logits = logits.masked_fill(removed, -torch.inf)
            experts = self._choose(mixture, logits, removed)
        real = weights.any(-1, keepdim=True)  # gates do not route padding
        call = replace(call, routing=Routing(weights=weights, logits=logits))
        return weigh(mixture, call, experts.masked_fill(~real, -1))

    def _choose(self, mixture: Mixture, logits: Tensor, removed: Tensor) -> Tensor:
        assert mixture.equivalent_gate is not None
        gate = self._gates.get(mixture.name)
        if gate is None:
            gate = self._gates[mixture.name] = copy.deepcopy(mixture.equivalent_gate)
            if gate.balance_bias is not None:
                gate.balance_bias.masked_fill_(removed, -torch.inf)
        return logits.topk(gate.k).indices if gate.chooses_by_logits else gate._choose(logits, None)


def removal_curve(
    model: nn.Module,
    mixtures: Sequence[Mixture],
    batches: Sequence[Any],
    loss: Loss,
    before: Tensor,
    routes: Mapping[str, Routes],
    seed: int,
) -> list[dict[str, Any]]:
    """The loss with 1, n/4, n/2 and 3n/4 experts removed from each mixture, by saliency and at random.

    Empty if the mixtures differ in n, or if the outputs of some experts are not known.
    """
    n = mixtures[0].num_experts
    saliency = {name: own.saliency for name, own in routes.items() if own.saliency is not None}
    if len(saliency) < len(mixtures) or any(mixture.num_experts != n for mixture in mixtures):
        return []
    k = fewest_experts(
        model, (0 if own.equivalent_gate is None else own.equivalent_gate.k for own in mixtures)
    )
    generator = torch.Generator().manual_seed(seed)
    chance = {name: torch.rand(n, generator=generator) for name in saliency}
    curve = [{"removed": 0, "by_saliency": float(before.mean()), "at_random": float(before.mean())}]
    for number in sorted({1, n // 4, n // 2, 3 * n // 4} - {0}):
        if n - number < k:
            break
        point: dict[str, Any] = {"removed": number}
        for key, order in (("by_saliency", saliency), ("at_random", chance)):
            with visiting(model, mixtures, WithoutExperts(rank_experts(order, n - number))):
                point[key] = float(collect_losses(model, batches, loss).mean())
        curve.append(point)
    return curve if len(curve) > 1 else []


def why_not_prunable(model: nn.Module, mixtures: Sequence[Mixture]) -> str | None:
    """The reason why experts of ``model`` cannot be removed, as a sentence; None if they can."""
    for mixture in mixtures:
        if mixture.library_gate is not None:
            return f"{mixture.name} has a gate of comet_moe, and only routers of transformers can be sliced"
        if mixture.gate is None:
            return f"the router of {mixture.name} was not found, so that its rows cannot be removed"
        sizes = [len(weight) for weight in mixture.expert_parameters.values()]
        if not isinstance(mixture, RoutedExperts) or any(size != mixture.num_experts for size in sizes):
            return f"the experts of {mixture.name} are not stacked in one tensor each"
        grouped = (mixture.gate, model.get_submodule(mixture.name))
        if any(
            getattr(module, name, 1) not in (None, 1)
            for module in grouped
            for name in ("num_group", "n_group")
        ):
            return f"the experts of {mixture.name} are in groups of equal size, which removing would break"
    if len({mixture.num_experts for mixture in mixtures}) > 1:
        return "the mixtures have different numbers of experts"
    return None


def fewest_experts(model: Any, most_experts: Iterable[int]) -> int:
    """The number of experts that must stay: as many as a token selects, or the configuration says.

    Args:
        model: its configuration may have ``num_experts_per_tok``.
        most_experts: the most experts of a token, by mixture.
    """
    config = text_config(getattr(model, "config", None))
    return max(*most_experts, int(getattr(config, "num_experts_per_tok", None) or 1), 1)


def rank_experts(saliency: Mapping[str, Tensor], keep: int) -> dict[str, Tensor]:
    """The ``keep`` experts of largest saliency of each mixture, in their order."""
    return {
        name: values.argsort(descending=True, stable=True)[:keep].sort().values
        for name, values in saliency.items()
    }


@torch.no_grad()
def _remove_experts(model: nn.Module, mixtures: Sequence[Mixture], kept: Mapping[str, Tensor]) -> None:
    """Keep only the experts ``kept`` (m,) of each mixture, in place, also in the configuration."""
    n, m = mixtures[0].num_experts, len(kept[mixtures[0].name])
    for mixture in mixtures:
        assert mixture.gate is not None
        assert mixture.experts is not None
        for module in (*mixture.gate.modules(), *mixture.experts.modules()):
            _slice_tensors(module, kept[mixture.name], n)
            _set_counts(module, n, m)
        _set_counts(model.get_submodule(mixture.name), n, m)
    config = getattr(model, "config", None)
    for owner in (model, config, text_config(config)):
        _set_counts(owner, n, m)


def _slice_tensors(module: nn.Module, chosen: Tensor, n: int) -> None:
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    for name, tensor in own:
        if tensor.dim() and len(tensor) == n:
            new = tensor[chosen.to(tensor.device)]
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(module, name, nn.Parameter(new, tensor.requires_grad) if is_parameter else new)


def _set_counts(owner: Any, n: int, m: int) -> None:
    for name in COUNT_NAMES:
        if getattr(owner, name, None) == n:
            setattr(owner, name, m)


@torch.no_grad()
def prune(
    model: nn.Module, batches: Sequence[Any], loss: Loss, experts: int, *, seed: int = 0
) -> dict[str, list[int]]:
    """Keep ``experts`` experts in each mixture of a model of transformers, in place.

    ``model.save_pretrained(folder)`` then writes a checkpoint that opens with plain transformers.

    Args:
        model: with routers of its own.
        batches: the data that decides which experts stay.
        loss: see :func:`comet_moe.audit.audit`.
        experts: m, the number of experts that stay.
        seed: as there.

    Returns:
        The experts that stay, by the name of the mixture.
    """
    mixtures = find_mixtures(model)
    reason = why_not_prunable(model, mixtures)
    if reason is not None:
        raise CometError(f"experts cannot be removed: {reason}")
    reader = RouteReader(mixtures, 0, 0, seed)
    with evaluating(model), visiting(model, mixtures, reader):
        for batch in batches:
            loss(model, batch)
    n = mixtures[0].num_experts
    k = fewest_experts(model, (routes.most_experts for routes in reader.routes.values()))
    if not k <= experts < n:
        raise CometError(
            f"experts is {experts}: give a number from {k}, which a token selects, to {n - 1}, one less than "
            "the model has"
        )
    saliency = {
        name: routes.saliency for name, routes in reader.routes.items() if routes.saliency is not None
    }
    kept = rank_experts(saliency, experts)
    _remove_experts(model, mixtures, kept)
    return {name: own.tolist() for name, own in kept.items()}
