"""Copies of a dense module as experts."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from comet_moe.experts.base import Experts
from comet_moe.experts.layers import FeedForwardExperts
from comet_moe.experts.modules import ModuleExperts

Copies = dict[nn.Parameter, list[nn.Parameter]]
"""By parameter of a dense module, those that have taken its place."""


class Copied(NamedTuple):
    """Copies of a dense module.

    Attributes:
        experts: the copies.
        shared: the expert for every row, or None.
        copies: where the parameters have gone.
        slices: by new parameter that has a part of the old one, the dimension of the neurons and its own.
    """

    experts: Experts
    shared: nn.Module | None
    copies: Copies
    slices: dict[nn.Parameter, tuple[int, Tensor]]


def copy_module(
    module: nn.Module, count: int, reinitialize: float = 0.0, shared_expert: float = 0.0
) -> Copied:
    """``count`` copies of ``module`` (m, p) -> (m, u) as experts.

    A ``Sequential`` of a linear layer, an activation and a linear layer becomes a stack, whose experts run
    in grouped matrix products. Other modules become :class:`ModuleExperts`.

    Args:
        module: is not changed.
        count: n.
        reinitialize: share of the neurons of each copy that are drawn anew, see :func:`redraw_neurons`; for
            a ``Sequential`` as above.
        shared_expert: share of the neurons that become the expert for every row, the first ones; the copies
            have the others. For a ``Sequential`` as above.
    """
    activation = _activation_between_two_linears(module)
    if activation is None:
        for name, value in (("reinitialize", reinitialize), ("shared_expert", shared_expert)):
            if value:
                raise ValueError(
                    f"{name} is for nn.Sequential(nn.Linear, activation, nn.Linear), whose neurons are "
                    f"known, got {type(module).__name__}: set {name} to 0"
                )
        members = [copy.deepcopy(module) for _ in range(count)]
        own = [list(member.parameters()) for member in members]
        copies = {old: list(new) for old, *new in zip(module.parameters(), *own, strict=True)}
        return Copied(ModuleExperts(members), None, copies, {})
    dense = _linears(module)
    neurons = torch.arange(dense[0].out_features)
    first = count_shared(shared_expert, len(neurons)) if shared_expert else 0
    members = [_keep_neurons(module, neurons[first:]) for _ in range(count)]
    for member in members if reinitialize else ():
        inner, outer = _linears(member)
        redraw_neurons([inner.weight], outer.weight, reinitialize)
    stack, shared = _stack(members, activation), None
    new = [[layer] for layer in (stack.inner, stack.outer)]
    if first:
        shared = _keep_neurons(module, neurons[:first])
        nn.init.zeros_(shared.get_submodule("2").get_parameter("bias"))  # the other experts have it
        new = [[*own, layer] for own, layer in zip(new, _linears(shared), strict=True)]
    copies = {
        getattr(old, name): [getattr(layer, name) for layer in own]
        for old, own in zip(dense, new, strict=True)
        for name in ("weight", "bias")
    }
    slices: dict[nn.Parameter, tuple[int, Tensor]] = {}
    for (inner, outer), kept in zip(zip(*new, strict=True), (neurons[first:], neurons[:first]), strict=False):
        slices |= {inner.weight: (0, kept), inner.bias: (0, kept), outer.weight: (1, kept)}
    return Copied(stack, shared, copies, slices if first else {})


def count_shared(share: float, neurons: int) -> int:
    """How many of ``neurons`` a shared expert with this ``share`` has; the other experts have the rest."""
    count = round(share * neurons)
    if not 0 < count < neurons:
        raise ValueError(
            f"shared_expert must leave neurons on both sides, got {share:g} of {neurons}: try 0.5, or 0 for "
            "none"
        )
    return count


@torch.no_grad()
def _keep_neurons(module: nn.Module, neurons: Tensor) -> nn.Module:
    """A copy of a linear layer, an activation and a linear layer with these neurons only."""
    kept = copy.deepcopy(module)
    first, last = _linears(kept)
    for linear, name, dimension in ((first, "weight", 0), (first, "bias", 0), (last, "weight", 1)):
        whole = getattr(linear, name)
        part = whole.index_select(dimension, neurons.to(whole.device))
        setattr(linear, name, nn.Parameter(part, requires_grad=whole.requires_grad))
    first.out_features = last.in_features = len(neurons)
    return kept


def _linears(module: Any) -> tuple[Any, Any]:
    """The linear layers of ``nn.Sequential(nn.Linear, activation, nn.Linear)``."""
    return module[0], module[2]


def _activation_between_two_linears(module: nn.Module) -> str | None:
    """The name of the activation, if a stack of experts computes what ``module`` does."""
    if type(module) is not nn.Sequential or len(module) != 3:
        return None
    first, middle, last = module
    is_plain = all(type(layer) is nn.Linear and layer.bias is not None for layer in (first, last))
    has_hooks = any(own._forward_hooks or own._forward_pre_hooks for own in module.modules())
    if not is_plain or has_hooks or len(set(module.parameters())) != 4:
        return None
    if type(middle) is nn.GELU:
        return "gelu" if middle.approximate == "none" else None
    known: dict[type[nn.Module], str] = {
        nn.ReLU: "relu",
        nn.SiLU: "silu",
        nn.Tanh: "tanh",
        nn.Identity: "identity",
    }
    return known.get(type(middle))


def _stack(members: Sequence[nn.Module], activation: str) -> FeedForwardExperts:
    """``members``, each (linear, activation, linear), as one stack of experts."""
    first, last = _linears(members[0])
    with torch.device("meta"):
        stack = FeedForwardExperts(
            len(members), first.in_features, first.out_features, last.out_features, activation
        )
    layers = (stack.inner, stack.outer)
    for layer, *own in zip(layers, *(_linears(member) for member in members), strict=True):
        for name in ("weight", "bias"):
            values = [getattr(linear, name) for linear in own]
            stacked = torch.stack([value.detach() for value in values])
            setattr(layer, name, nn.Parameter(stacked, requires_grad=values[0].requires_grad))
    return stack


@torch.no_grad()
def redraw_neurons(inner: Sequence[Tensor], outer: Tensor, share: float) -> None:
    """Draw a random ``share`` of the neurons of a layer anew, in place.

    In Drop-Upcycling (Nakamura et al. 2025) copies differ so from the start. The new weights come from a
    normal distribution with the mean and the standard deviation of those that they replace. Biases stay.

    Args:
        inner: (neurons, in) each, the matrices before the neurons.
        outer: (out, neurons).
        share: of the neurons, between 0 and 1.
    """
    neurons = outer.shape[1]
    chosen = torch.randperm(neurons)[: round(share * neurons)].to(outer.device)
    if not len(chosen):
        return
    for weight in (*inner, outer.t()):
        old = weight[chosen]
        weight[chosen] = torch.randn_like(old) * old.std(correction=0) + old.mean()
