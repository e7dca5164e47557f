"""Routers of other libraries, such as transformers: what they return, and Top-k gates that route as they do.

Shapes: N tokens, p features, n experts, k choices.
"""

import copy
import inspect
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from comet_moe.exceptions import IdleGateWarning
from comet_moe.gates import TopKGate


class RouterSizes(NamedTuple):
    """Sizes of a router: p, n and k."""

    in_features: int
    num_experts: int
    k: int


class RouterAdapter:
    """Which modules of a family of models are routers, their sizes, and what they return.

    A module is a router without an adapter if it stands beside experts whose ``forward`` takes hidden states,
    indices and weights. It must have ``top_k``, a weight of shape (n, p), and return (logits, weights,
    experts). For other routers, override the methods.

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

    def sizes(self, router: nn.Module) -> RouterSizes:
        """The sizes of ``router``."""
        linear, k = find_linear(router), getattr(router, "top_k", None)
        if linear is None or not isinstance(k, int):
            raise not_read(router)
        n, features = linear.weight.shape
        return RouterSizes(features, n, k)

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
    "llama4": DenseScoresAdapter("Llama4Router"),
    "llama4_text": DenseScoresAdapter("Llama4Router"),
}
"""By ``model_type`` of the configuration, for families whose routers are not recognised; add yours."""


def find_adapter(model: nn.Module) -> RouterAdapter:
    """The adapter of the family of ``model``."""
    return ADAPTERS.get(getattr(getattr(model, "config", None), "model_type", ""), RouterAdapter())


def find_linear(router: nn.Module) -> Any:
    """The module in ``router``, or itself, that has the weight (n, p); None without one."""
    for module in router.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            return module
    return None


def not_read(router: nn.Module) -> ValueError:
    """The error for a router that needs another adapter."""
    return ValueError(
        f"a {type(router).__name__} does not return (logits, weights, experts): pass replace_routers an "
        "adapter, a comet_moe.hf.RouterAdapter"
    )


BIAS_NAMES = ("e_score_correction_bias", "expert_bias")
SCALE_NAMES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
COPY_TOLERANCE = 1e-5
"""Of weights of at most ``scale``; one other expert differs by far more."""


@torch.no_grad()
def copy_router(router: nn.Module, adapter: RouterAdapter, owner: nn.Module) -> TopKGate:
    """A gate that routes as ``router`` does.

    The balancing bias is copied and does not move. Scores are a softmax or sigmoids, and may be divided by
    the sum of the selected. The first such gate is taken that routes random tokens as the router does.

    Args:
        router: of another library.
        adapter: says what it returns.
        owner: the mixture that it is in, which has the balancing bias in some families.
    """
    sizes, linear = adapter.sizes(router), find_linear(router)
    x = torch.randn(64, sizes.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(linear.weight.device)
    output = probe(router, adapter, owner, x)
    if output is not None:
        weights, experts = adapter.routes(output)
        wanted = weights.new_zeros(len(weights), sizes.num_experts).scatter(-1, experts, weights).float()
        for gate in _candidates(router, sizes, _tensors_of(router, owner)):
            gate.to(x.device)
            gate.weight.copy_(linear.weight)
            if getattr(linear, "bias", None) is not None:
                gate.bias.copy_(linear.bias)
            if torch.allclose(gate(x).weights, wanted, atol=COPY_TOLERANCE):
                return gate
    raise ValueError(
        f"a {type(router).__name__} routes in a way that TopKGate does not have: pass replace_routers a "
        "factory"
    )


def _candidates(router: Any, sizes: RouterSizes, tensors: dict[str, Tensor]) -> Iterator[TopKGate]:
    """Gates of the groups, scale and balancing bias of ``router``, with each score and normalisation."""
    bias = next((tensor for name, tensor in tensors.items() if name.endswith(BIAS_NAMES)), None)
    scale = next((getattr(router, name) for name in SCALE_NAMES if hasattr(router, name)), 1.0)
    groups = getattr(router, "num_group", None) or 1
    top_groups = getattr(router, "topk_group", None) or groups
    scores: tuple[Literal["softmax", "sigmoid"], ...] = ("softmax", "sigmoid")
    normalizations: tuple[Literal["selected", "all"], ...] = ("selected", "all")
    for score, normalize in product(scores, normalizations):
        # The first weights are drawn and not used. replace_routers warns of the gate that is the right one.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", IdleGateWarning)
            gate = TopKGate(
                *sizes, normalize=normalize, score=score, groups=groups, top_groups=top_groups, scale=scale
            )
        if bias is not None and gate.balance_bias is not None:
            gate.balance_bias.copy_(bias.flatten())
        yield gate


def probe(router: nn.Module, adapter: RouterAdapter, owner: nn.Module, x: Tensor) -> Any:
    """What ``router`` returns for rows ``x`` (N, p); None if it needs more than rows.

    ValueError if it returns something else than the adapter reads.
    """
    # Not exact(x): the copy has the hooks of the router.
    exact, tensors = copy.deepcopy(router).float().eval(), _tensors_of(router, owner)
    given = inspect.signature(exact.forward).parameters.keys() & tensors.keys()
    try:
        output = exact.forward(x, **{name: tensors[name] for name in given})
    except (TypeError, ValueError):
        return None
    except (IndexError, RuntimeError) as error:  # rows of sequences
        raise not_read(router) from error
    try:
        weights, experts = adapter.routes(output)
        is_read = (
            weights.shape == experts.shape and not experts.is_floating_point() and len(weights) == len(x)
        )
    except (TypeError, ValueError, AttributeError):
        is_read = False
    if not is_read:
        raise not_read(router)
    return output


def _tensors_of(router: nn.Module, owner: nn.Module) -> dict[str, Tensor]:
    """The tensors of a mixture itself, and the buffers of its router, by name."""
    own = (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))
    return dict((*own, *router.named_buffers()))
