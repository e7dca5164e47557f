"""A mixture with fewer experts: which to keep, and the smaller model.

The experts with the least mean of weight times norm of the output go (REAP, Lasby et al. 2025). The rows of
the router and of the stacked experts are sliced; the router then chooses among those that are left.

Shapes: n experts, m of them kept.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe.audit.mixtures import Mixture, RoutedExperts, find_mixtures, visiting
from comet_moe.audit.routes import RouteReader
from comet_moe.audit.training import evaluating, is_gate_of_ours, text_config
from comet_moe.exceptions import CometError
from comet_moe.interventions import Loss

COUNT_NAMES = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
"""Attributes of modules and configurations of transformers that hold n."""

Undo = Callable[[], object]


def why_not_prunable(model: nn.Module, mixtures: Sequence[Mixture]) -> str | None:
    """The reason why experts of ``model`` cannot be removed, as a sentence; None if they can."""
    for mixture in mixtures:
        if not isinstance(mixture, RoutedExperts) or is_gate_of_ours(mixture):
            return f"{mixture.name} has a gate of comet_moe, and only routers of transformers can be sliced"
        if mixture.router is None:
            return f"the router of {mixture.name} was not found, so that its rows cannot be removed"
        sizes = [len(weight) for weight in mixture.expert_parameters.values()]
        if any(size != mixture.num_experts for size in sizes):
            return f"the experts of {mixture.name} are not stacked in one tensor each"
        grouped = [mixture.router, *([] if mixture.name == "" else [model.get_submodule(mixture.name)])]
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
def remove_experts(model: nn.Module, mixtures: Sequence[Mixture], kept: Mapping[str, Tensor]) -> Undo:
    """Keep only the experts ``kept`` (m,) of each mixture, in place; returns a function that undoes it.

    The configuration of a model of transformers gets the new number.
    """
    undo: list[Undo] = []
    for mixture in mixtures:
        assert isinstance(mixture, RoutedExperts)
        assert mixture.router is not None
        chosen, n = kept[mixture.name], mixture.num_experts
        for owner in (mixture.router, mixture.experts):
            for module in owner.modules():
                _slice_tensors(module, chosen, n, undo)
        parent = model.get_submodule(mixture.name)
        for module in {mixture.experts, mixture.router, parent}:
            _set_counts(module, n, len(chosen), undo)
    n = mixtures[0].num_experts
    config = getattr(model, "config", None)
    for owner in {id(one): one for one in (model, config, text_config(config)) if one is not None}.values():
        _set_counts(owner, n, len(kept[mixtures[0].name]), undo)

    def undo_all() -> None:
        for step in reversed(undo):
            step()

    return undo_all


@contextmanager
def removed(model: nn.Module, mixtures: Sequence[Mixture], kept: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with the experts ``kept`` only, within the block; needs memory for a copy of them."""
    undo = remove_experts(model, mixtures, kept)
    try:
        yield
    finally:
        undo()


def _slice_tensors(module: nn.Module, chosen: Tensor, n: int, undo: list[Undo]) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if len(parameter) == n:
            new = nn.Parameter(parameter[chosen.to(parameter.device)], requires_grad=parameter.requires_grad)
            setattr(module, name, new)
            undo.append(partial(setattr, module, name, parameter))
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.dim() and len(buffer) == n:
            setattr(module, name, buffer[chosen.to(buffer.device)])
            undo.append(partial(setattr, module, name, buffer))


def _set_counts(owner: Any, n: int, new: int, undo: list[Undo]) -> None:
    for name in COUNT_NAMES:
        if getattr(owner, name, None) == n:
            setattr(owner, name, new)
            undo.append(partial(setattr, owner, name, n))


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
    remove_experts(model, mixtures, kept)
    return {name: own.tolist() for name, own in kept.items()}
