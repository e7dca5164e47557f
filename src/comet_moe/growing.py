"""A dense model grows in the middle of its training: layers become copies of themselves behind a gate."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from comet_moe import checks
from comet_moe.experts.copies import Copies, copy_module
from comet_moe.gates import Gate, RescaledGate
from comet_moe.local_search import GateFactory, gate_factory
from comet_moe.mixture.dispatch import Execution
from comet_moe.mixture.moe import MoE, MultiGateMoE
from comet_moe.optimization import Growth, Slice


def grow(
    model: nn.Module,
    experts: int,
    k: int = 1,
    gate: str | GateFactory = "comet",
    *,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    gate_lr: float | None = None,
    layers: Sequence[str] | Sequence[int] | None = None,
    reinitialize: float = 0.0,
    shared_expert: float = 0.0,
    noise: float = 0.0,
    rescale: bool = True,
    execution: Execution = "auto",
    **settings: Any,
) -> list[str]:
    """Turn layers of a dense model into mixtures of copies, in place, between two optimiser steps.

    With ``reinitialize=0`` and ``noise=0`` the output of the model does not change, as the weights of the
    gates sum to 1. Each copy has the optimiser state of its layer, such as the moments of Adam. New gates
    start without any. Drop the gradients first (``optimizer.zero_grad()``).

    A run that is resumed after the change builds the dense model and grows it with the same arguments. Then
    it loads the states of model, optimiser and scheduler.

    With ``DistributedDataParallel``, grow the module inside on all ranks, then wrap it again: the wrapper
    gives all ranks the gates of the first one. Experts are spread over ranks, and parameters sharded, after
    growing.

    Args:
        model: a dense model.
        experts: E, copies of each layer.
        k: experts per row at most, once the gate is hard.
        gate: a name such as "topk" or "comet+", see :func:`comet_moe.hf.gate_factory`; or a function
            ``factory(in_features, num_experts, k)`` that makes a gate.
        optimizer: of ``model``; None if there is none yet.
        scheduler: of the learning rate of ``optimizer``, needed where ``gate_lr`` is given. A group that is
            added follows the schedule of the layer's group.
        gate_lr: learning rate of the new gates where their schedule is at 1, in a group without weight
            decay. None puts them into the group of their layer.
        layers: names of the modules to grow, each (..., p) -> (..., u). Indices and None are for the
            feed-forward layers of a model of transformers, see :func:`comet_moe.hf.upcycle`.
        reinitialize: share of the neurons of each copy that are drawn anew (Drop-Upcycling, Nakamura et al.
            2025), so that copies differ from the start.
        shared_expert: share of the neurons of a layer that become one expert for every row, see
            :func:`comet_moe.hf.upcycle`.
        noise: see :func:`comet_moe.hf.upcycle`; for models of transformers.
        rescale: wrap gates whose weights do not sum to 1 in a :class:`~comet_moe.gates.RescaledGate`.
        execution: of the mixtures, see :class:`~comet_moe.MoE`.
        settings: of a gate by name. For models of transformers also the further arguments of
            :func:`comet_moe.hf.upcycle`.

    Returns:
        The names of the mixtures.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from comet_moe import grow
        >>> layer = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
        >>> model = nn.Sequential(nn.Linear(8, 16), layer)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> x = torch.randn(4, 8)
        >>> before = model(x)
        >>> grow(model, experts=4, k=2, gate="topk", optimizer=optimizer, layers=["1"])
        ['1']
        >>> torch.testing.assert_close(model(x), before)
    """
    checks.require_type("model", model, nn.Module)
    checks.at_least_one("experts", experts)
    checks.not_negative("noise", noise)
    checks.share("reinitialize", reinitialize)
    checks.share("shared_expert", shared_expert)
    _check_is_whole(model)
    growth = None
    if optimizer is not None:
        checks.require_type("optimizer", optimizer, Optimizer)
        growth = Growth(optimizer, scheduler, gate_lr)
    elif scheduler is not None or gate_lr is not None:
        raise ValueError("scheduler and gate_lr are for an optimiser: pass optimizer as well")
    names = [name for name in layers or () if isinstance(name, str)]
    if not names:
        options = {"layers": layers, "noise": noise, "reinitialize": reinitialize, "execution": execution}
        options |= {"shared_expert": shared_expert, "rescale": rescale}
        grown = _grow_transformer(model, experts, k, gate, options | settings)
    elif noise:
        raise ValueError("noise is for models of transformers: with names in layers use reinitialize")
    else:
        factory = gate_factory(gate, **settings) if isinstance(gate, str) else gate
        modules = _find_layers(model, names)
        gates = {
            name: _make_gate(factory, module, name, experts, k, rescale) for name, module in modules.items()
        }
        grown = _grow_modules(model, modules, gates, reinitialize, shared_expert, execution)
    if growth is not None:
        for copies, new_gates, slices in grown.values():
            growth.apply(copies, new_gates, slices)
    return list(grown)


Grown = dict[str, tuple[Copies, nn.Module, dict[nn.Parameter, Slice]]]
"""By name of a mixture, where the parameters of its layer have gone, its gates, and what is only a part."""


def _grow_transformer(
    model: nn.Module, experts: int, k: int, gate: str | GateFactory, options: Mapping[str, Any]
) -> Grown:
    from comet_moe.hf.feed_forward import inside_layout, neuron_slices
    from comet_moe.hf.upcycling import UpcycledMixture, upcycle

    before = dict(model.named_modules())
    upcycle(model, experts, k, gate, **options)
    grown: Grown = {}
    for name, mixture in model.named_modules():
        if not isinstance(mixture, UpcycledMixture) or mixture is before[name]:
            continue
        dense = [before[name]]
        if mixture.layout.outside:
            parent = name.rpartition(".")[0]
            dense.append(before[f"{parent}.{mixture.layout.outside}"])
        members = list(mixture.experts.get_submodule("members").children())
        slices: dict[nn.Parameter, Slice] = {}
        if mixture.neurons is not None:
            kept = list(mixture.neurons.experts)
            if mixture.shared is not None:
                members.append(mixture.shared)
                kept.append(mixture.neurons.shared)
            for member, neurons in zip(members, kept, strict=True):
                parts = neuron_slices(member, inside_layout(mixture.layout), neurons)
                slices |= {member.get_parameter(parameter): part for parameter, part in parts.items()}
        old = [parameter for module in dense for parameter in module.parameters()]
        new = [list(member.parameters()) for member in members]
        copies = {one: list(own) for one, *own in zip(old, *new, strict=True)}
        grown[name] = copies, mixture.gates, slices
    return grown


def _find_layers(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """The modules of ``names``, which must be dense layers that do not contain each other."""
    known = dict(model.named_modules())
    for name in names:
        if not name or name not in known:
            raise ValueError(f"layers must be names of modules within the model, got {name!r}")
        if any(isinstance(module, MultiGateMoE) for module in known[name].modules()):
            raise ValueError(f"layer {name} is or has a mixture already: leave it out of layers")
        outer = next((other for other in names if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ValueError(f"layer {name} is within the layer {outer}: leave one of them out of layers")
    return {name: known[name] for name in names}


def _make_gate(
    factory: GateFactory, module: nn.Module, name: str, experts: int, k: int, rescale: bool
) -> Gate:
    linear = next((own for own in module.modules() if isinstance(own, nn.Linear)), None)
    if linear is None or any(isinstance(own, _ConvNd) for own in module.modules()):
        raise ValueError(
            f"a layer to grow must have linear layers and no convolutions, so that a gate can read its rows, "
            f"got {name}, a {type(module).__name__}"
        )
    gate = factory(linear.in_features, experts, k)
    checks.require_type("what gate returns", gate, Gate)
    like = linear.weight
    gate = gate.to(like.device, like.dtype)
    return RescaledGate(gate) if rescale and not gate.sums_to_one else gate


def _grow_modules(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    gates: Mapping[str, Gate],
    reinitialize: float,
    shared_expert: float,
    execution: Execution,
) -> Grown:
    grown: Grown = {}
    for name, module in modules.items():
        stack, shared, copies, slices = copy_module(
            module, gates[name].num_experts, reinitialize, shared_expert
        )
        options: dict[str, Any] = {"execution": execution, "return_routing": False}
        mixture = MoE(experts=stack, gate=gates[name], shared=shared, **options)
        model.set_submodule(name, mixture.train(module.training))
        grown[name] = copies, mixture.gates, slices
    return grown


def _check_is_whole(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        raise ValueError("model is wrapped in DistributedDataParallel: grow model.module, then wrap it again")
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        raise ValueError("the parameters of model are sharded: grow the model before it is sharded")
