"""Gates of this library in place of the routers of transformers' mixtures.

Shapes: N tokens (B sequences of T), p features, n experts, k choices.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe import checks
from comet_moe.exceptions import IdleGateWarning, needs_extra
from comet_moe.gates import Gate, HashGate, TopKGate
from comet_moe.hf.gated_modules import TokenReader, innermost, pass_tokens, store_description
from comet_moe.local_search import GateFactory
from comet_moe.mixture.routers import RouterAdapter, RouterSizes, copy_router, find_adapter, probe
from comet_moe.mixture.visits import find_routed
from comet_moe.routing import Routing

with needs_extra("hf", "comet_moe.hf"):
    from transformers.utils.output_capturing import _active_collector

SMALLEST_WEIGHT = 1e-6
"""Weights below it count as this much in the logits of a gate that has none."""


class GateRouter(TokenReader):
    """A gate as a router of transformers.

    Unlike Top-k, a gate may select different numbers of experts for different tokens. The router returns as
    many slots as the token with most experts needs, with weight 0 in unused ones. Padding has weight 0
    everywhere. In compiled graphs, whose shapes are fixed, all n experts have a slot. Top-k and hash gates,
    wrapped or not, always return k slots.

    Args:
        gate: any gate.
        sizes: of the router that it replaces.
        adapter: of the family.
    """

    def __init__(self, gate: Gate, sizes: RouterSizes, adapter: RouterAdapter):
        super().__init__()
        self.gate = gate
        self.adapter = adapter
        self.sizes = sizes
        self.hidden_dim, self.num_experts, self.top_k = sizes  # which some mixtures read

    def forward(self, hidden_states: Tensor, *others: Any, **more: Any) -> Any:
        """(N, p) or (B, T, p) -> what the adapter makes of logits (N, n), weights and experts (N, slots).

        Other arguments are of the router that this replaces: the gate has its own keys and biases.
        """
        x, ids, mask = self.with_tokens(hidden_states, self.gate)
        routing = self.gate(x, keys=ids, mask=mask)
        weights, experts = routing.top(self._count_slots(routing))
        logits = router_logits(routing).flatten(0, -2)
        recorded = _active_collector.get()
        if recorded is not None and "router_logits" in recorded:  # output_router_logits=True
            recorded["router_logits"].append(logits)
        return self.adapter.output(logits, weights.flatten(0, -2), experts.flatten(0, -2))

    def describe(self) -> dict[str, Any]:
        """The adapter knows the rest."""
        return {"kind": "router"}

    def _count_slots(self, routing: Routing) -> int:
        is_soft = self.gate.training and self.gate.soft_in_training
        if isinstance(innermost(self.gate), TopKGate | HashGate) and self.gate.k is not None and not is_soft:
            return self.gate.k  # no look at the weights, which an accelerator may not have computed yet
        if torch.compiler.is_compiling():
            return self.num_experts
        return max(1, int(routing.weights.count_nonzero(-1).max()))


def router_logits(routing: Routing) -> Tensor:
    """(..., n) logits of a routing; for a gate without logits log(max(weights, 1e-6)).

    The softmax of the latter gives the weights, up to their scale. A load-balancing loss computed from the
    logits then uses the gate's own probabilities.
    """
    if routing.logits is not None:
        return routing.logits
    return routing.weights.clamp_min(SMALLEST_WEIGHT).log()


def replace_routers(
    model: nn.Module,
    factory: GateFactory | None = None,
    *,
    wrap: Callable[[Gate], Gate] | None = None,
    adapter: RouterAdapter | None = None,
) -> None:
    """Put gates into the mixtures of ``model`` in place of its routers; the experts stay as they are.

    Args:
        model: a mixture of transformers such as Mixtral, Qwen3-MoE or DeepSeek-V3, or any with ``adapter``.
        factory: called as ``factory(in_features, num_experts, k)`` for each mixture; None makes a
            :class:`~comet_moe.gates.TopKGate` that routes as the model's own router does.
        wrap: applied to each gate, such as ``lambda gate: RegularizedGate(gate, load_balance=0.01)``.
        adapter: for a family that is not known by name.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> from comet_moe.gates import CometGate
        >>> from comet_moe.hf import replace_routers
        >>> config = MixtralConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...                        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        >>> model = MixtralForCausalLM(config)
        >>> replace_routers(model, lambda in_features, num_experts, k: CometGate(in_features, num_experts, k))
        >>> model.model.layers[0].mlp.gate.gate
        CometGate(in_features=16, num_experts=4, k=2, gamma=1, entropy=0)
    """
    checks.require_type("model", model, nn.Module)
    adapter = adapter or find_adapter(model)
    new = {}
    for name, router in find_routers(model, adapter).items():
        sizes, owner = sizes_of(router, adapter), model.get_submodule(name.rpartition(".")[0])
        if isinstance(router, GateRouter):
            gate = router.gate if factory is None else make_gate(factory, sizes)
        elif factory is None:
            gate = copy_router(router, adapter, owner)
        else:
            like = next(router.parameters())
            if type(adapter) is RouterAdapter:
                probe(router, adapter, owner, torch.zeros(2, sizes.in_features, device=like.device))
            gate = make_gate(factory, sizes)
        gate = wrap(gate) if wrap is not None else gate
        check_gate_fits(gate, name, sizes)
        new[name] = gate
    warn_of_idle_gates(new)
    install_gates(model, new, adapter)
    store_description(model)


def install_gates(model: nn.Module, gates: Mapping[str, Gate], adapter: RouterAdapter) -> None:
    """Put ``gates``, by the name of the router that each replaces, into ``model``."""
    for name, gate in gates.items():
        router = model.get_submodule(name)
        like = next(chain(router.parameters(), model.parameters()))
        new = GateRouter(gate.to(like.device, like.dtype), sizes_of(router, adapter), adapter)
        model.set_submodule(name, new.train(router.training))
    pass_tokens(model)


def find_routers(model: nn.Module, adapter: RouterAdapter) -> dict[str, nn.Module]:
    """The routers of ``model`` by name, replaced ones included."""
    routers = {
        mixture.gate_name: mixture.gate for mixture in find_routed(model, adapter) if mixture.gate is not None
    }
    routers |= {name: module for name, module in model.named_modules() if isinstance(module, GateRouter)}
    if routers:
        return routers
    if any(re.search("Router|Experts|M[oO]E|Moe", type(module).__name__) for module in model.modules()):
        raise ValueError(
            f"the routers of {type(model).__name__} are not recognised: pass replace_routers an adapter, a "
            "comet_moe.hf.RouterAdapter"
        )
    raise ValueError(
        f"{type(model).__name__} has no mixtures whose routers could be replaced: make some of its "
        "feed-forward layers with comet_moe.hf.upcycle"
    )


def sizes_of(router: nn.Module, adapter: RouterAdapter) -> RouterSizes:
    """The sizes of a router, replaced or not."""
    return router.sizes if isinstance(router, GateRouter) else RouterSizes(*adapter.sizes(router))


def check_gate_fits(gate: Gate, name: str, sizes: RouterSizes) -> None:
    """ValueError if the sizes of ``gate`` are not those of the mixture called ``name``."""
    if not isinstance(gate, Gate):
        raise ValueError(f"the factory must return a gate of comet_moe.gates, got {type(gate).__name__}")
    if gate.num_experts != sizes.num_experts:
        raise ValueError(
            f"the gate for {name} chooses among {gate.num_experts} experts, there are {sizes.num_experts}"
        )
    if gate.in_features not in (None, sizes.in_features):
        raise ValueError(
            f"the gate for {name} reads {gate.in_features} features, its input has {sizes.in_features}"
        )


def idle_gates(gates: Mapping[str, Gate]) -> list[str]:
    """The names of the gates, by the name of their mixture, that get no gradient from the loss of the model.

    A Top-1 gate that divides by the sum of the selected scores is one: its weight is the constant 1.
    """
    idle = []
    for name, gate in gates.items():
        inner = innermost(gate)
        parameters = {parameter for parameter, _ in inner.named_parameters()}
        if inner.num_experts > 1 and parameters and parameters <= inner.idle_parameters():
            idle.append(name)
    return idle


def make_gate(factory: GateFactory, sizes: RouterSizes) -> Gate:
    """``factory(*sizes)``, where :func:`warn_of_idle_gates` warns of gates that are not trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IdleGateWarning)
        return factory(*sizes)


def warn_of_idle_gates(gates: Mapping[str, Gate]) -> None:
    """Warn of :func:`idle_gates`."""
    idle = idle_gates(gates)
    if idle:
        warnings.warn(
            f"the loss of the model does not train the gates of {len(idle)} mixtures, such as {idle[0]}, "
            'whose only selected expert always has weight 1: use TopKGate(..., normalize="all"), or k > 1',
            IdleGateWarning,
            stacklevel=3,
        )
