"""Every mixture of a model behind one small interface: its routes, its gate, its experts.

Two kinds are found, and a family of models needs no code of its own:

- gates of this library, in a mixture of this library or anywhere else;
- modules of experts whose ``forward`` takes hidden states, the selected experts and their weights. All
  mixtures of transformers with routers of their own are of this kind. Gates of this library that replaced
  those routers are seen there too.

Shapes: B sequences of T tokens, N = B·T rows (tables: N = B rows), n experts, k choices, p features, u
outputs.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from comet_moe.gates.base import Gate
from comet_moe.mixture.dispatch import run_experts
from comet_moe.mixture.find import outermost_gates
from comet_moe.mixture.moe import MultiGateMoE
from comet_moe.routing import Routing

INDEX_NAMES = ("top_k_index", "router_indices", "selected_experts")
WEIGHT_NAMES = ("top_k_weights", "routing_weights")
"""Names that the modules of experts of transformers give to their second and third argument."""


@dataclass(frozen=True)
class Call:
    """One call of a mixture.

    Attributes:
        inputs: (N, p), what the experts read.
        routing: weights (N, n), with logits where the router returned them. Padding is not masked.
        shape: (B, T), or (N,) where rows are no sequences.
        mask: (N,) bool, False where a row is padding; None if nothing is.
        position: (N,) position of each row in its sequence, padding not counted.
        aux_loss: that of the gate, for gates of this library in training mode.
    """

    inputs: Tensor
    routing: Routing
    shape: tuple[int, ...]
    mask: Tensor | None
    position: Tensor
    aux_loss: Tensor | None = None

    def real_rows(self) -> Tensor:
        """Indices of the rows that are not padding."""
        if self.mask is None:
            return torch.arange(len(self.inputs), device=self.inputs.device)
        return self.mask.nonzero()[:, 0]


Visit = Callable[["Mixture", Call], Tensor | None]
"""Sees a call of a mixture; what it returns, (N, n), takes the place of the weights."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of the current forward pass: shape (B, T), mask and positions (B·T,)."""

    shape: tuple[int, ...]
    mask: Tensor | None
    position: Tensor


class Mixture(ABC):
    """A mixture of a model.

    Attributes:
        name: in the model.
        num_experts: n.
        gate_parameters: what decides the routes; empty for hash gates.
        expert_parameters: those of the routed experts.
        tokens: of the current forward pass; None where the model does not say.
    """

    name: str
    num_experts: int
    gate_parameters: dict[str, nn.Parameter]
    expert_parameters: dict[str, nn.Parameter]
    tokens: Tokens | None = None

    @abstractmethod
    def attach(self, visit: Visit) -> list[RemovableHandle]:
        """Show each call to ``visit`` until the handles are removed."""

    @property
    def has_outputs(self) -> bool:
        """Whether :meth:`run` works."""
        return True

    @abstractmethod
    def run(self, expert: int, rows: Tensor) -> Tensor:
        """The output of one expert: (m, p) -> (m, u)."""

    def _call(self, inputs: Tensor, routing: Routing, leading: Sequence[int], mask: Tensor | None) -> Call:
        tokens = self.tokens
        if tokens is not None and tokens.position.numel() == len(inputs):
            return Call(inputs, routing, tokens.shape, tokens.mask, tokens.position, routing._aux_loss)
        flat = None if mask is None else mask.flatten()
        shape = tuple(leading)
        return Call(inputs, routing, shape, flat, positions(shape, flat, inputs.device), routing._aux_loss)


def positions(shape: Sequence[int], mask: Tensor | None, device: torch.device) -> Tensor:
    """(N,) how many tokens of its sequence precede each row; padding on either side does not count."""
    if len(shape) < 2:
        return torch.zeros(tuple(shape), dtype=torch.int64, device=device).flatten()
    real = torch.ones(tuple(shape), dtype=torch.int64, device=device) if mask is None else mask.reshape(shape)
    return (real.long().cumsum(1) - 1).clamp_min(0).flatten()


class GatedMixture(Mixture):
    """A gate of this library, with the experts of the mixture that it is in."""

    def __init__(self, name: str, gate: Gate, owner: MultiGateMoE | None):
        self.name, self.gate, self.owner = name, gate, owner
        self.num_experts = gate.num_experts
        self.gate_parameters = dict(gate.named_parameters())
        self.expert_parameters = {} if owner is None else dict(owner.experts.named_parameters())

    def attach(self, visit: Visit) -> list[RemovableHandle]:
        """A hook after the gate."""

        def hook(gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any], routing: Routing) -> Any:
            x = args[0] if args else kwargs["x"]
            routing = routing.masked(kwargs.get("mask"))  # as after this hook
            logits = None if routing.logits is None else routing.logits.flatten(0, -2)
            flat = Routing(weights=routing.weights.flatten(0, -2), logits=logits, aux_loss=routing._aux_loss)
            flat.candidates = routing.candidates
            changed = visit(self, self._call(x.flatten(0, -2), flat, x.shape[:-1], kwargs.get("mask")))
            if changed is None:
                return None
            return routing.with_weights(changed.reshape(routing.weights.shape))

        return [self.gate.register_forward_hook(hook, with_kwargs=True)]

    @property
    def has_outputs(self) -> bool:
        """Experts that read what the gate reads."""
        return self.owner is not None and self.owner.experts.input_rank == 1

    def run(self, expert: int, rows: Tensor) -> Tensor:
        """As the mixture runs it, with weight 1."""
        assert self.owner is not None
        weights = rows.new_zeros(len(rows), self.num_experts)
        weights[:, expert] = 1
        return run_experts(self.owner.experts, rows, [Routing(weights=weights)], "sparse", 1.0).squeeze(1)


class RoutedExperts(Mixture):
    """A module of experts that gets the selected experts and their weights, and the router beside it."""

    def __init__(self, name: str, experts: nn.Module, router: nn.Module | None):
        self.name, self.experts, self.router = name, experts, router
        names = _argument_names(experts)
        assert names is not None
        self._names = names
        self.num_experts = count_experts(experts)
        self.gate_parameters = {} if router is None else dict(router.named_parameters())
        self.expert_parameters = dict(experts.named_parameters())
        self._is_own_call = False
        self._returned: tuple[Tensor | None, Tensor | None] = None, None

    def attach(self, visit: Visit) -> list[RemovableHandle]:
        """A hook before the experts, and hooks after the router and the gate in it."""

        def keep(router: nn.Module, args: Any, output: Any) -> None:
            found = [value for value in _as_tuple(output) if isinstance(value, Tensor) and value.dim()]
            logits = next((value for value in found if value.shape[-1] == self.num_experts), None)
            if logits is not None:
                logits = logits.reshape(-1, self.num_experts) if logits.is_floating_point() else None
            self._returned = logits, self._returned[1]

        def keep_aux_loss(gate: nn.Module, args: Any, routing: Routing) -> None:
            self._returned = self._returned[0], routing._aux_loss

        def hook(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._is_own_call:
                return None
            inputs, index, weight = (
                args[place] if place < len(args) else kwargs[name] for place, name in enumerate(self._names)
            )
            logits, aux_loss = self._returned
            self._returned = None, None
            rows = inputs.reshape(-1, inputs.shape[-1])
            if logits is not None and len(logits) != len(rows):
                logits = None
            dense = to_dense(index, weight, self.num_experts)
            routing = Routing(weights=dense, logits=logits, aux_loss=aux_loss)
            changed = visit(self, self._call(rows, routing, inputs.shape[:-1], None))
            if changed is None:
                return None
            new_weight, new_index = changed.to(weight.dtype).topk(index.shape[-1], -1)
            return (inputs, new_index.to(index.dtype), new_weight), {}

        handles = [self.experts.register_forward_pre_hook(hook, with_kwargs=True)]
        if self.router is not None:
            handles.append(self.router.register_forward_hook(keep))
            inner = getattr(self.router, "gate", None)
            if isinstance(inner, Gate):
                handles.append(inner.register_forward_hook(keep_aux_loss))
        return handles

    def run(self, expert: int, rows: Tensor) -> Tensor:
        """One expert with weight 1, by the module's own implementation."""
        index = torch.full((len(rows), 1), expert, device=rows.device)
        self._is_own_call = True
        try:
            output: Tensor = self.experts(rows, index, rows.new_ones(len(rows), 1))
        finally:
            self._is_own_call = False
        return output


def to_dense(index: Tensor, weight: Tensor, num_experts: int) -> Tensor:
    """(N, k) experts and weights -> (N, n). Experts beyond the last, such as identities, are left out."""
    slots = weight.new_zeros(len(weight), num_experts + 1)
    return slots.scatter_add(1, index.long().clamp_max(num_experts), weight)[:, :num_experts]


def count_experts(experts: Any) -> int:
    """n: the attribute ``num_experts``, or the size of the stacked weights."""
    number = getattr(experts, "num_experts", None)
    return number if isinstance(number, int) else len(next(experts.parameters()))


def find_mixtures(model: nn.Module) -> list[Mixture]:
    """All mixtures of ``model`` in its order.

    Args:
        model: with gates of this library, with routers of transformers, or with both.

    Raises:
        ValueError: there are none.

    Example:
        >>> from comet_moe import MoE
        >>> from comet_moe.audit import find_mixtures
        >>> from comet_moe.experts import DenseExperts
        >>> from comet_moe.gates import TopKGate
        >>> moe = MoE(experts=DenseExperts(4, 8, 8), gate=TopKGate(8, 4, k=1))
        >>> [(mixture.name, mixture.num_experts) for mixture in find_mixtures(moe)]
        [('gates.0', 4)]
    """
    modules = dict(model.named_modules())
    found: dict[str, Mixture] = {}
    replaced: set[nn.Module] = set()
    for name, module in modules.items():
        if name and _argument_names(module):
            parent = name.rpartition(".")[0]
            router = _find_router(modules, name, count_experts(module))
            found[name] = RoutedExperts(parent or name, module, router)
            replaced.update(router.modules() if router is not None else ())
    owners = {
        gate: module
        for module in modules.values()
        if isinstance(module, MultiGateMoE)
        for gate in module.gates
    }
    for name, gate, _ in outermost_gates(model):
        if gate not in replaced:
            found[name] = GatedMixture(name, gate, owners.get(gate))
    if not found:
        raise ValueError(
            f"the model must hold mixtures of experts, {type(model).__name__} has none: neither gates of "
            "comet_moe.gates nor experts that take indices and weights"
        )
    order = {name: place for place, name in enumerate(modules)}
    return [found[name] for name in sorted(found, key=lambda name: order.get(name, len(order)))]


def _argument_names(module: nn.Module) -> tuple[str, str, str] | None:
    """The first three arguments of a module of experts; None for other modules."""
    return _first_arguments(type(module).forward)


@lru_cache
def _first_arguments(forward: Callable[..., Any]) -> tuple[str, str, str] | None:
    names = list(inspect.signature(forward).parameters)[1:]  # of the function that a decorator wraps
    if len(names) < 3 or names[1] not in INDEX_NAMES or names[2] not in WEIGHT_NAMES:
        return None
    return names[0], names[1], names[2]


def _find_router(modules: dict[str, nn.Module], name: str, num_experts: int) -> nn.Module | None:
    """The module beside the experts, or beside their parent, that has a weight of one row per expert."""
    own = name
    while own:
        parent = own.rpartition(".")[0]
        for child_name, child in modules[parent].named_children():
            path = f"{parent}.{child_name}" if parent else child_name
            if path == own or "expert" in child_name:
                continue
            holds_gate = any(isinstance(module, Gate) for module in child.modules())
            if holds_gate or any(
                weight.dim() == 2 and len(weight) == num_experts for weight in child.parameters()
            ):
                return child
        if parent.rpartition(".")[2].isdigit() or own != name:
            return None
        own = parent
    return None


def _as_tuple(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


@contextmanager
def visiting(model: nn.Module, mixtures: Sequence[Mixture], visit: Visit) -> Iterator[None]:
    """Show each call of ``mixtures`` to ``visit`` within the block.

    The mask and the positions of tokens come from the arguments of the model: ``attention_mask`` (B, T), and
    ``position_ids`` of packed sequences.
    """
    with ExitStack() as hooks:
        reader = _token_reader(model, mixtures)
        if reader is not None:
            hooks.callback(reader.remove)
        for mixture in mixtures:
            for handle in mixture.attach(visit):
                hooks.callback(handle.remove)
        try:
            yield
        finally:
            for mixture in mixtures:
                mixture.tokens = None


def _token_reader(model: nn.Module, mixtures: Sequence[Mixture]) -> RemovableHandle | None:
    """A hook before the model that takes sequences of tokens: gives them to the mixtures."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    if "input_ids" not in names and "kwargs" not in names:
        return None

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        tokens = _read_tokens(given)
        for mixture in mixtures:
            mixture.tokens = tokens

    return model.register_forward_pre_hook(hook, with_kwargs=True)


def _read_tokens(given: dict[str, Any]) -> Tokens | None:
    ids, embeddings = given.get("input_ids"), given.get("inputs_embeds")
    like = ids if ids is not None else None if embeddings is None else embeddings[..., 0]
    if not isinstance(like, Tensor) or like.dim() != 2:
        return None
    shape, mask, position = tuple(like.shape), given.get("attention_mask"), given.get("position_ids")
    is_padding = isinstance(mask, Tensor) and mask.shape == like.shape
    flat = (mask != 0).flatten() if is_padding and mask is not None else None
    if flat is not None and bool(flat.all()):
        flat = None
    if isinstance(position, Tensor) and position.shape[-1] == shape[1]:
        return Tokens(shape, flat, position.expand(shape).flatten())
    return Tokens(shape, flat, positions(shape, flat, like.device))
