"""Gates of this library in place of the routers of transformers' mixtures.

Shapes: N tokens (B sequences of T), p features, n experts, k choices.
"""

import copy
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from comet_moe import checks
from comet_moe.exceptions import IdleGateWarning, needs_extra
from comet_moe.gates import Gate, HashGate, TopKGate
from comet_moe.hf.gated_modules import TokenReader, innermost, pass_tokens, store_description
from comet_moe.local_search import GateFactory
from comet_moe.routes import FINDERS
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

    Most routers of transformers have the attributes ``top_k`` and ``num_experts`` and a ``weight`` of shape
    (n, p), and return (logits, weights, experts). They are recognised by that. For those of another class
    that return the same, it is enough to name it. For others, override the methods.

    Args:
        router_class: name of the class of the routers; empty for any class named like a router.
        linear: name of the linear layer in a router; empty where the router itself has the weight.

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

    def __init__(self, router_class: str = "", linear: str = ""):
        self.router_class = router_class
        self.linear = linear

    def is_router(self, name: str, module: nn.Module) -> bool:
        """Whether the module called ``name`` in the model is a router."""
        if self.router_class:
            return type(module).__name__ == self.router_class
        weight = getattr(module, "weight", None)
        return (
            type(module).__name__.endswith("Router")
            and not isinstance(module, nn.Linear)
            and hasattr(module, "top_k")
            and isinstance(weight, Tensor)
            and weight.dim() == 2
            and len(weight) == getattr(module, "num_experts", None)
        )

    def sizes(self, router: Any) -> RouterSizes:
        """The sizes of ``router``."""
        is_ours = isinstance(router, GateRouter)
        features = router.hidden_dim if is_ours else self._linear(router).weight.shape[1]
        return RouterSizes(features, router.num_experts, router.top_k)

    def _linear(self, router: Any) -> Any:
        return router.get_submodule(self.linear)

    def output(self, logits: Tensor, weights: Tensor, experts: Tensor) -> Any:
        """What the mixture expects from its router.

        Args:
            logits: (N, n).
            weights, experts: (N, c), the selected experts of each token; weight 0 where a slot is unused.
        """
        return logits, weights, experts

    def routes(self, output: Any) -> tuple[Tensor, Tensor]:
        """Weights and experts, (N, c) each, in what a router of the family returned."""
        _, weights, experts = output
        return weights, experts

    @torch.no_grad()
    def copy(self, router: Any, owner: Any) -> TopKGate:
        """A gate that routes as ``router`` does, for :func:`replace_routers` without a factory.

        The balancing bias is copied and does not move. Scores are a softmax or sigmoids, and may be divided
        by the sum of the selected. The first such gate is taken that routes random tokens as the router does.

        Args:
            router: of the family.
            owner: the mixture that it is in, which has the balancing bias in some families.
        """
        sizes, linear = self.sizes(router), self._linear(router)
        of_both = _buffers_of_both(router, owner)
        bias = next((of_both[name] for name in of_both if name.endswith(BIAS_NAMES)), None)
        scale = next((getattr(router, name) for name in SCALE_NAMES if hasattr(router, name)), 1.0)
        groups = getattr(router, "num_group", None) or 1
        top_groups = getattr(router, "topk_group", None) or groups
        x = torch.randn(64, sizes.in_features, generator=torch.Generator().manual_seed(0))
        x = x.to(linear.weight.device)
        output = self.probe(router, owner, x)
        if output is None:
            raise _not_copied(router)
        weights, experts = self.routes(output)
        wanted = weights.new_zeros(len(weights), sizes.num_experts).scatter(-1, experts, weights).float()
        settings: dict[str, Any] = {"groups": groups, "top_groups": top_groups, "scale": scale}
        for score, normalize in product(SCORES, NORMALIZATIONS):
            with warnings.catch_warnings():  # replace_routers warns of the gate that is the right one
                warnings.simplefilter("ignore", IdleGateWarning)
                gate = TopKGate(*sizes, normalize=normalize, score=score, **settings).to(x.device)
            gate.weight.copy_(linear.weight)
            if getattr(linear, "bias", None) is not None:
                gate.bias.copy_(linear.bias)
            if bias is not None and gate.balance_bias is not None:
                gate.balance_bias.copy_(bias.flatten())
            if torch.allclose(gate(x).weights, wanted, atol=COPY_TOLERANCE):
                return gate
        raise _not_copied(router)

    def probe(self, router: Any, owner: Any, x: Tensor) -> Any:
        """What ``router`` returns for rows ``x`` (N, p); None if it needs more than rows.

        ValueError if it returns something else than :meth:`routes` reads.
        """
        exact = copy.deepcopy(router).float().eval()
        of_both = _buffers_of_both(router, owner)
        given = inspect.signature(exact.forward).parameters.keys() & of_both.keys()
        try:
            output = exact(x, **{name: of_both[name] for name in given})
        except (TypeError, ValueError):
            return None
        try:
            weights, experts = self.routes(output)
            is_read = (
                weights.shape == experts.shape and not experts.is_floating_point() and len(weights) == len(x)
            )
        except (TypeError, ValueError, AttributeError):
            is_read = False
        if not is_read:
            raise ValueError(
                f"a {type(router).__name__} does not return (logits, weights, experts): pass replace_routers "
                "an adapter, a comet_moe.hf.RouterAdapter"
            )
        return output


def _buffers_of_both(router: nn.Module, owner: nn.Module) -> dict[str, Tensor]:
    """The tensors of a mixture itself, and the buffers of its router, by name."""
    own = (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))
    return dict((*own, *router.named_buffers()))


def _not_copied(router: nn.Module) -> ValueError:
    return ValueError(
        f"a {type(router).__name__} routes in a way that TopKGate does not have: pass replace_routers a "
        "factory"
    )


SCORES: tuple[Literal["softmax", "sigmoid"], ...] = ("softmax", "sigmoid")
NORMALIZATIONS: tuple[Literal["selected", "all"], ...] = ("selected", "all")
BIAS_NAMES = ("e_score_correction_bias", "expert_bias")
SCALE_NAMES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
COPY_TOLERANCE = 1e-5
"""Of weights of at most ``scale``; one other expert differs by far more."""


class DenseScoresAdapter(RouterAdapter):
    """Routers that return (weights of all experts, logits), as in Llama 4."""

    def output(self, logits: Tensor, weights: Tensor, experts: Tensor) -> Any:
        """(N, n) twice."""
        return torch.zeros_like(logits).scatter(-1, experts, weights.to(logits.dtype)), logits

    def routes(self, output: Any) -> tuple[Tensor, Tensor]:
        """All experts; those that are not selected have weight 0."""
        weights, _ = output
        return weights, torch.arange(weights.shape[-1], device=weights.device).expand_as(weights)


ADAPTERS: dict[str, RouterAdapter] = {
    "afmoe": RouterAdapter("AfmoeTokenChoiceRouter", linear="gate"),
    "hunyuan_v1_moe": RouterAdapter("HunYuanMoEV1Gate", linear="wg"),
    "llama4": DenseScoresAdapter("Llama4Router"),
    "llama4_text": DenseScoresAdapter("Llama4Router"),
    "phimoe": RouterAdapter("PhimoeTopKRouter"),
}
"""By ``model_type`` of the configuration, for families whose routers are not recognised; add yours."""


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
    routers = find_routers(model, adapter)
    new = {}
    for name, router in routers.items():
        sizes = RouterSizes(*adapter.sizes(router))
        owner = model.get_submodule(name.rpartition(".")[0])
        if factory is not None:
            is_recognised = type(adapter) is RouterAdapter and not adapter.router_class
            if is_recognised and not isinstance(router, GateRouter):
                like = next(router.parameters())
                adapter.probe(router, owner, torch.zeros(2, sizes.in_features, device=like.device))
            gate = factory(*sizes)
        else:
            gate = router.gate if isinstance(router, GateRouter) else adapter.copy(router, owner)
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


def find_copies(model: nn.Module) -> Iterator[tuple[str, nn.Module, RouterAdapter, TopKGate | None]]:
    """The model's own routers: name, router, adapter, and a gate that routes as it does or None."""
    adapter = ADAPTERS.get(getattr(getattr(model, "config", None), "model_type", ""), RouterAdapter())
    for name, module in model.named_modules():
        if adapter.is_router(name, module):
            try:
                copied = adapter.copy(module, model.get_submodule(name.rpartition(".")[0]))
            except ValueError:
                copied = None
            yield name, module, adapter, copied


FINDERS.append(find_copies)


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


def find_adapter(model: Any) -> RouterAdapter:
    """The adapter of the family of ``model``."""
    adapter = ADAPTERS.get(getattr(getattr(model, "config", None), "model_type", ""), RouterAdapter())
    modules = dict(model.named_modules())
    if any(
        isinstance(module, GateRouter) or adapter.is_router(name, module) for name, module in modules.items()
    ):
        return adapter
    kinds = {type(module).__name__ for module in modules.values()}
    if any(re.search("Router|Experts|M[oO]E|Moe", kind) for kind in kinds):
        raise ValueError(
            f"the routers of {type(model).__name__} are not recognised: pass replace_routers an adapter, a "
            "comet_moe.hf.RouterAdapter"
        )
    return adapter  # finds none, and that is the error
