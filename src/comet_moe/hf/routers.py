"""Gates of this library in place of the routers of transformers' mixtures.

Shapes: N tokens (B sequences of T), p features, n experts, k choices.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from comet_moe import checks
from comet_moe.exceptions import IdleGateWarning, needs_extra
from comet_moe.gates import Gate, HashGate, TopKGate
from comet_moe.hf.gated_modules import TokenReader, innermost, pass_tokens, store_description
from comet_moe.local_search import GateFactory
from comet_moe.routing import Routing

with needs_extra("hf", "comet_moe.hf"):
    from transformers.utils.output_capturing import _active_collector

SMALLEST_WEIGHT = 1e-6
"""Weights below it count as this much in the logits of a gate that has none."""


class RouterSizes(NamedTuple):
    """Sizes of a router: p, n and k."""

    in_features: int
    num_experts: int
    k: int


class RouterAdapter:
    """Where the routers of a family of models are, their sizes, and what they return.

    The routers of most families have the attributes ``hidden_dim``, ``num_experts`` and ``top_k``, and return
    (logits, weights, experts). For those it is enough to name their class. For others, override the methods.

    Args:
        router_class: name of the class of the routers.

    Example:
        A model whose routers are linear layers called ``router`` and return weights of all experts:

        >>> import torch
        >>> from comet_moe.hf import RouterAdapter, RouterSizes
        >>> class LinearRouterAdapter(RouterAdapter):
        ...     def is_router(self, name, module):
        ...         return name.endswith(".router")
        ...
        ...     def sizes(self, router):
        ...         return RouterSizes(router.in_features, router.out_features, 2)
        ...
        ...     def output(self, logits, weights, experts):
        ...         return torch.zeros_like(logits).scatter(-1, experts, weights)
    """

    def __init__(self, router_class: str = ""):
        self.router_class = router_class

    def is_router(self, name: str, module: nn.Module) -> bool:
        """Whether the module called ``name`` in the model is a router."""
        return type(module).__name__ == self.router_class

    def sizes(self, router: Any) -> RouterSizes:
        """The sizes of ``router``."""
        return RouterSizes(router.hidden_dim, router.num_experts, router.top_k)

    def output(self, logits: Tensor, weights: Tensor, experts: Tensor) -> Any:
        """What the mixture expects from its router.

        Args:
            logits: (N, n).
            weights, experts: (N, c), the selected experts of each token; weight 0 where a slot is unused.
        """
        return logits, weights, experts

    def copy(self, router: Any) -> TopKGate:
        """A gate that routes as ``router`` does, for :func:`replace_routers` without a factory."""
        sizes = self.sizes(router)
        gate = TopKGate(*sizes, normalize="selected" if getattr(router, "norm_topk_prob", True) else "all")
        return _with_weights_of(router, gate)


class SigmoidRouterAdapter(RouterAdapter):
    """Routers with sigmoid scores, groups and a balancing bias, as in DeepSeek-V3."""

    def copy(self, router: Any) -> TopKGate:
        """A gate that routes as ``router`` does; its balancing bias is copied and does not move."""
        gate = TopKGate(
            *self.sizes(router),
            normalize="selected" if router.norm_topk_prob else "all",
            score="sigmoid",
            groups=router.num_group,
            top_groups=router.topk_group,
            scale=router.routed_scaling_factor,
        )
        assert gate.balance_bias is not None
        gate.balance_bias.copy_(router.e_score_correction_bias)
        return _with_weights_of(router, gate)


@torch.no_grad()
def _with_weights_of(router: Any, gate: TopKGate) -> TopKGate:
    gate.weight.copy_(router.weight)
    return gate


ADAPTERS: dict[str, RouterAdapter] = {
    "mixtral": RouterAdapter("MixtralTopKRouter"),
    "qwen2_moe": RouterAdapter("Qwen2MoeTopKRouter"),
    "qwen3_moe": RouterAdapter("Qwen3MoeTopKRouter"),
    "olmoe": RouterAdapter("OlmoeTopKRouter"),
    "deepseek_v3": SigmoidRouterAdapter("DeepseekV3TopkRouter"),
}
"""By ``model_type`` of the configuration; an adapter of your own can be added."""


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
        self.hidden_dim, self.num_experts, self.top_k = sizes

    def forward(self, hidden_states: Tensor) -> Any:
        """(N, p) or (B, T, p) -> what the adapter makes of logits (N, n), weights and experts (N, slots)."""
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
        model: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE or DeepSeek-V3 of transformers, or any with ``adapter``.
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
    routers = find_routers(model, adapter)
    new = {}
    for name, router in routers.items():
        sizes = RouterSizes(*adapter.sizes(router))
        if factory is not None:
            gate = factory(*sizes)
        else:
            gate = router.gate if isinstance(router, GateRouter) else adapter.copy(router)
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
        new = GateRouter(gate.to(like.device, like.dtype), adapter.sizes(router), adapter)
        model.set_submodule(name, new.train(router.training))
    pass_tokens(model)


def find_routers(model: nn.Module, adapter: RouterAdapter) -> dict[str, nn.Module]:
    """The routers of ``model`` by name, replaced ones included."""
    routers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, GateRouter) or adapter.is_router(name, module)
    }
    if not routers:
        raise ValueError(
            f"{type(model).__name__} has no mixtures whose routers could be replaced: make some of its "
            "feed-forward layers with comet_moe.hf.upcycle"
        )
    return routers


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


def warn_of_idle_gates(gates: Mapping[str, Gate]) -> None:
    """Warn if gates, by the name of their mixture, get no gradient from the loss of the model.

    A Top-1 gate that divides by the sum of the selected scores is one: its weight is the constant 1.
    """
    idle = []
    for name, gate in gates.items():
        inner = innermost(gate)
        parameters = {parameter for parameter, _ in inner.named_parameters()}
        if inner.num_experts > 1 and parameters and parameters <= inner.idle_parameters():
            idle.append(name)
    if idle:
        warnings.warn(
            f"the loss of the model does not train the gates of {len(idle)} mixtures, such as {idle[0]}, "
            'whose only selected expert always has weight 1: use TopKGate(..., normalize="all"), or k > 1',
            IdleGateWarning,
            stacklevel=3,
        )


def find_adapter(model: Any) -> RouterAdapter:
    """The adapter of the family of ``model``."""
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family in ADAPTERS:
        return ADAPTERS[family]
    kinds = {type(module).__name__ for module in model.modules()}
    if any(re.search("Router|Experts|M[oO]E|Moe", kind) for kind in kinds):
        raise ValueError(
            f"the routers of {type(model).__name__} are not known, only those of {', '.join(ADAPTERS)}: pass "
            "replace_routers an adapter, a comet_moe.hf.RouterAdapter"
        )
    return RouterAdapter()  # finds none, and that is the error
