"""Dense transformers made sparse: each feed-forward layer becomes a mixture.

Shapes: B sequences, T tokens, p features, E experts, L layers.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe import checks
from comet_moe.experts import ModuleExperts
from comet_moe.experts.copies import redraw_neurons
from comet_moe.gates import Gate, RescaledGate
from comet_moe.hf.feed_forward import (
    FeedForwardLayout,
    Neurons,
    assign_neurons,
    count_features,
    find_feed_forward,
    find_layout,
    find_names,
    keep_neurons,
    rank_neurons,
    set_apart_neurons,
    take_whole,
    weight_of,
)
from comet_moe.hf.gated_modules import TokenReader, pass_tokens, store_description
from comet_moe.hf.routers import check_gate_fits, make_gate, warn_of_idle_gates
from comet_moe.local_search import GateFactory, gate_factory
from comet_moe.memory import require_memory
from comet_moe.mixture.dispatch import Execution
from comet_moe.mixture.moe import MoE
from comet_moe.mixture.routers import RouterSizes


class UpcycledMixture(MoE, TokenReader):
    """A mixture in the place of a feed-forward layer, of modules like that layer: (B, T, p) -> (B, T, p).

    Padding passes no expert and has the output 0.

    Args:
        experts: E modules (m, p) -> (m, p).
        gate: over E experts.
        layout: of the family.
        neurons: of the layer, which each expert has at the start; None for copies.
        shared: an expert for every token.
        execution: see :class:`~comet_moe.MoE`.
    """

    def __init__(
        self,
        experts: Sequence[nn.Module],
        gate: Gate,
        layout: FeedForwardLayout,
        neurons: Neurons | None,
        shared: nn.Module | None,
        execution: Execution,
    ):
        super().__init__(
            experts=ModuleExperts(experts),
            gate=gate,
            execution=execution,
            shared=shared,
            return_routing=False,
        )
        self.layout = layout
        self.neurons = neurons

    @property
    def gate(self) -> Gate:  # type: ignore[override]
        """The gate; with adapters of peft, the module that peft put around it."""
        gate: Any = self.gates[0]
        return gate

    def replace_gate(self, gate: Gate) -> None:
        """Put ``gate`` in the place of the gate."""
        self.gates[0] = gate

    def describe(self) -> dict[str, Any]:
        """How the layer was found and split."""
        return {
            "kind": "feed_forward",
            "layout": [self.layout.pattern, list(self.layout.inner), self.layout.outer, self.layout.outside],
            "expert_size": None if self.neurons is None else self.neurons.experts.shape[1],
            "shared_size": 0 if self.neurons is None else len(self.neurons.shared),
            "execution": self.execution,
        }

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Mix the experts, with the tokens of this forward pass."""
        x, ids, mask = self.with_tokens(hidden_states, self.gate)
        mixed = super().forward(x, keys=ids, mask=mask)
        assert isinstance(mixed, Tensor)
        return mixed.reshape(*hidden_states.shape[:-1], -1)


def upcycle(
    model: nn.Module,
    experts: int,
    k: int = 1,
    gate: str | GateFactory = "comet",
    noise: float = 0.0,
    *,
    expert_size: int | None = None,
    shared: int = 0,
    shared_expert: float = 0.0,
    importance: Tensor | Sequence[Tensor] | None = None,
    layers: Sequence[int] | None = None,
    pattern: str | FeedForwardLayout | None = None,
    reinitialize: float = 0.0,
    rescale: bool = True,
    execution: Execution = "auto",
    search_steps: int = 0,
    **settings: Any,
) -> None:
    """Turn the feed-forward layers of a dense model into mixtures, in place.

    The experts are copies of the layer (sparse upcycling, Komatsuzaki et al. 2022). With ``expert_size``,
    each has some of its neurons, as in COMET-BERT. With copies and ``noise=0`` the output of the model does
    not change.

    Args:
        model: Llama, GPT-2, GPT-NeoX, BERT or ViT of transformers, or any with ``pattern``.
        experts: E, experts per layer.
        k: experts per token at most, once the gate is hard.
        gate: a name such as "topk" or "comet+", see :func:`gate_factory`; or a function
            ``factory(in_features, num_experts, k)`` that makes a gate.
        noise: standard deviation of the noise added to each weight matrix of each expert, in standard
            deviations of that matrix.
        expert_size: neurons per expert; None makes copies.
        shared: neurons that every expert has, the most important ones.
        shared_expert: share S of the neurons of a layer, the most important ones, that become one expert for
            every token. The other experts are copies of the rest. With k=1 a token then costs what it does in
            the dense model, and with S = 1 / 2 all experts have one size.
        importance: (L, neurons), from :func:`comet_moe.hf.importance`, for the layers that are converted;
            None to assign the neurons in their order.
        layers: indices of the feed-forward layers to convert; None means all that are dense.
        pattern: for other families, a regular expression that the names of feed-forward layers end with. To
            split the layers, pass a :class:`~comet_moe.hf.FeedForwardLayout`.
        reinitialize: share of the neurons of each expert that are drawn anew (Drop-Upcycling, Nakamura et al.
            2025), see :func:`~comet_moe.experts.copies.redraw_neurons`.
        rescale: wrap gates whose weights do not sum to 1 in a :class:`~comet_moe.hf.RescaledGate`.
        execution: of the mixtures, see :class:`~comet_moe.MoE`.
        search_steps, settings: see :func:`gate_factory`, for a gate by name.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from comet_moe.hf import upcycle
        >>> config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> upcycle(model, experts=4, k=1, gate="comet")
        >>> model.model.layers[0].mlp.gate
        CometGate(in_features=16, num_experts=4, k=1, gamma=1, entropy=0)
    """
    checks.at_least_one("experts", experts)
    checks.not_negative("noise", noise)
    checks.share("reinitialize", reinitialize)
    checks.share("shared_expert", shared_expert)
    layout = find_layout(model, pattern)
    if reinitialize and not layout.inner:
        raise ValueError(
            "reinitialize needs the neurons of a layer: pass pattern as a FeedForwardLayout with inner and "
            "outer"
        )
    names = _choose(model, find_names(model, layout), layers)
    _require_memory(model, names, layout, experts, expert_size, shared_expert)
    if isinstance(gate, str):
        keys = getattr(getattr(model, "config", None), "vocab_size", None)
        factory = gate_factory(gate, vocab_size=keys, search_steps=search_steps, **settings)
    elif settings:
        raise ValueError(f"{', '.join(settings)}: settings are for a gate by name, and gate is a function")
    else:
        factory = gate
    assigned = _assign(model, names, layout, experts, expert_size, shared, shared_expert, importance)
    gates = {name: _make_gate(factory, model, name, experts, k, rescale) for name in names}
    warn_of_idle_gates(gates)
    for name in names:
        mixture = build_mixture(model, name, layout, gates[name], assigned.get(name), execution, reinitialize)
        for weight in (parameter.detach() for parameter in mixture.experts.parameters()):
            if noise > 0 and weight.dim() > 1:
                weight.add_(torch.randn_like(weight), alpha=noise * float(weight.std()))
    pass_tokens(model)
    store_description(model)


def _require_memory(
    model: nn.Module,
    names: Sequence[str],
    layout: FeedForwardLayout,
    experts: int,
    expert_size: int | None,
    shared_expert: float,
) -> None:
    """ValueError if the experts of these layers would not fit: copies, or ``expert_size`` neurons each."""
    if layout.inner:
        layers = find_feed_forward(model, layout, names)
        modules = [module for layer in layers for module in (*layer.inner, layer.outer)]
        size = len(weight_of(layers[0].inner[0]))
        share = 1 - shared_expert if expert_size is None else expert_size / size
    else:
        modules, share = [model.get_submodule(name) for name in names], 1.0
    whole = sum(weight.nbytes for module in modules for weight in module.parameters())
    needed = (experts * share + shared_expert) * whole
    require_memory(needed, f"{experts:,} experts", "choose fewer experts", ValueError)


def build_mixture(
    model: nn.Module,
    name: str,
    layout: FeedForwardLayout,
    gate: Gate,
    neurons: Neurons | None,
    execution: Execution,
    reinitialize: float = 0.0,
) -> UpcycledMixture:
    """Put a mixture in the place of the feed-forward layer called ``name``.

    Its experts have the ``neurons`` of the layer; None makes copies. Of the neurons of the experts that are
    not shared, a share ``reinitialize`` is drawn anew.
    """
    is_training = model.get_submodule(name).training
    whole, inside = take_whole(model, name, layout)
    experts = []
    for expert in range(gate.num_experts):
        member = copy.deepcopy(whole)
        if neurons is not None:
            keep_neurons(member, inside, neurons.experts[expert])
        if reinitialize:
            inner = [weight_of(member.get_submodule(part)) for part in inside.inner]
            redraw_neurons(inner, weight_of(member.get_submodule(inside.outer)), reinitialize)
        experts.append(member)
    always = None
    if neurons is not None and len(neurons.shared):
        always = copy.deepcopy(whole)
        keep_neurons(always, inside, neurons.shared)
        bias: Any = getattr(always.get_submodule(inside.outer), "bias", None)
        if bias is not None:
            nn.init.zeros_(bias)  # the other experts have it
    like = next(whole.parameters())
    gate = gate.to(like.device, like.dtype)
    mixture = UpcycledMixture(experts, gate, layout, neurons, always, execution)
    model.set_submodule(name, mixture.train(is_training))
    return mixture


def _choose(model: nn.Module, names: list[str], layers: Sequence[int] | None) -> list[str]:
    """The names of the layers to convert; None means all that are not mixtures already."""
    converted = {name for name in names if isinstance(model.get_submodule(name), UpcycledMixture)}
    if layers is None:
        layers = [layer for layer, name in enumerate(names) if name not in converted]
        if not layers:
            raise ValueError(f"all feed-forward layers of {type(model).__name__} are mixtures already")
    for layer in layers:
        if not 0 <= layer < len(names):
            raise ValueError(f"layers must be in 0..{len(names) - 1}, got {layer}")
        if names[layer] in converted:
            raise ValueError(f"layer {layer}, {names[layer]}, is a mixture already: leave it out of layers")
    return [names[layer] for layer in sorted(set(layers))]


def _assign(
    model: nn.Module,
    names: Sequence[str],
    layout: FeedForwardLayout,
    experts: int,
    expert_size: int | None,
    shared: int,
    shared_expert: float,
    importance: Tensor | Sequence[Tensor] | None,
) -> dict[str, Neurons]:
    """The neurons of the experts of each layer; empty for copies."""
    if expert_size is None and not shared_expert:
        if shared or importance is not None:
            raise ValueError(
                "shared and importance are for experts of some neurons each: set expert_size or shared_expert"
            )
        return {}
    if shared_expert and (expert_size is not None or shared):
        raise ValueError(
            f"shared_expert={shared_expert:g} makes copies of the other neurons: leave expert_size and "
            "shared out"
        )
    if not layout.inner:
        raise ValueError(
            "a feed-forward layer can only be split where its linear layers are known: pass pattern as a "
            "FeedForwardLayout with inner and outer"
        )
    neurons = len(weight_of(model.get_submodule(names[0]).get_submodule(layout.inner[0])))
    ranked = rank_neurons(importance, len(names), neurons)
    if expert_size is None:
        return {
            name: set_apart_neurons(order, experts, shared_expert)
            for name, order in zip(names, ranked, strict=True)
        }
    return {
        name: Neurons(assign_neurons(order, experts, expert_size, shared))
        for name, order in zip(names, ranked, strict=True)
    }


def _make_gate(
    factory: GateFactory, model: nn.Module, name: str, experts: int, k: int, rescale: bool
) -> Gate:
    sizes = RouterSizes(count_features(model.get_submodule(name)), experts, k)
    gate = make_gate(factory, sizes)
    check_gate_fits(gate, name, sizes)
    return RescaledGate(gate) if rescale and not gate.sums_to_one else gate
