"""Copies of a dense module as experts."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe.experts.base import Experts
from comet_moe.experts.layers import FeedForwardExperts
from comet_moe.experts.modules import ModuleExperts

Copies = dict[nn.Parameter, list[nn.Parameter]]
"""By parameter of a dense module, those that have taken its place."""


def copy_module(module: nn.Module, count: int, reinitialize: float = 0.0) -> tuple[Experts, Copies]:
    """``count`` copies of ``module`` (m, p) -> (m, u) as experts, and where its parameters have gone.

    A ``Sequential`` of a linear layer, an activation and a linear layer becomes a stack, whose experts run
    in grouped matrix products. Other modules become :class:`ModuleExperts`.

    Args:
        module: is not changed.
        count: n.
        reinitialize: share of the neurons of each copy that are drawn anew, see :func:`redraw_neurons`; for
            a ``Sequential`` as above.
    """
    members = [copy.deepcopy(module) for _ in range(count)]
    activation = _activation_between_two_linears(module)
    if reinitialize:
        if activation is None:
            raise ValueError(
                f"reinitialize is for nn.Sequential(nn.Linear, activation, nn.Linear), whose neurons are "
                f"known, got {type(module).__name__}: set reinitialize to 0"
            )
        for member in members:
            first, last = _linears(member)
            redraw_neurons([first.weight], last.weight, reinitialize)
    if activation is None:
        own = [list(member.parameters()) for member in members]
        copies = {old: list(new) for old, *new in zip(module.parameters(), *own, strict=True)}
        return ModuleExperts(members), copies
    stack, copies = _stack(members, activation), {}
    for dense, layer in zip(_linears(module), (stack.inner, stack.outer), strict=True):
        copies |= {dense.weight: [layer.weight], dense.bias: [layer.bias]}
    return stack, copies


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
