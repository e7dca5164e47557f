"""Every mixture of a model behind one interface: its routes are seen, and may be replaced.

Three kinds are found, and a family of models needs no code of its own for the first two:

- gates of this library, in a mixture of this library or anywhere else;
- modules of experts whose ``forward`` takes hidden states, the selected experts and their weights. Nearly all
  mixtures of transformers are of this kind, also if a gate of this library is their router;
- routers with a :class:`~comet_moe.mixture.routers.RouterAdapter`.

Shapes: B sequences of T tokens, N = B·T rows (tables: N = B rows), n experts, k choices, p features, u
outputs.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from comet_moe.exceptions import CometError
from comet_moe.experts import Experts
from comet_moe.gates import Gate, RegularizedGate, TopKGate
from comet_moe.mixture.dispatch import run_experts
from comet_moe.mixture.find import outermost_gates
from comet_moe.mixture.routers import RouterAdapter, RouterSizes, copy_router, find_adapter
from comet_moe.routing import Routing

INDEX_NAMES = ("top_k_index", "router_indices", "selected_experts")
WEIGHT_NAMES = ("top_k_weights", "routing_weights")
"""Names that the modules of experts of transformers give to their second and third argument."""

ROUTER_NAMES = ("gate", "router")


@dataclass(frozen=True)
class Tokens:
    """The tokens of a forward pass.

    Attributes:
        shape: (B, T), or (N,) where rows are no sequences.
        mask: (N,) bool, False where a row is padding; None if nothing is.
        position: (N,) position of each row in its sequence, padding not counted.
    """

    shape: tuple[int, ...]
    mask: Tensor | None
    position: Tensor

    @classmethod
    def of(cls, shape: Sequence[int], mask: Tensor | None, device: torch.device) -> "Tokens":
        """With positions counted; padding on either side does not count."""
        if len(shape) < 2:
            position = torch.zeros(tuple(shape), dtype=torch.int64, device=device)
        else:
            real = torch.ones(tuple(shape), device=device) if mask is None else mask.reshape(shape)
            position = (real.long().cumsum(1) - 1).clamp_min(0)
        return cls(tuple(shape), None if mask is None else mask.flatten(), position.flatten())


@dataclass(frozen=True)
class Call:
    """One call of a mixture.

    Attributes:
        inputs: (N, p), what the experts read.
        routing: weights (N, n), with logits where the router returned them. Padding is not masked.
        tokens: shape, mask and positions of the rows.
    """

    inputs: Tensor
    routing: Routing
    tokens: Tokens

    def real_rows(self) -> Tensor:
        """Indices of the rows that are not padding."""
        if self.tokens.mask is None:
            return torch.arange(len(self.inputs), device=self.inputs.device)
        return self.tokens.mask.nonzero()[:, 0]


Visit = Callable[["Mixture", Call], Tensor | None]
"""Sees a call of a mixture; what it returns, (N, n), takes the place of the weights."""


class Mixture(ABC):
    """A mixture of a model.

    Args:
        name: in the model.
        num_experts: n.
        gate: the gate or router; None if it was not found.
        gate_name: in the model.
        experts: the module of the routed experts; None for a gate on its own.

    Attributes:
        tokens: of the current forward pass; None where the model does not say.
    """

    tokens: Tokens | None = None

    def __init__(
        self, name: str, num_experts: int, gate: nn.Module | None, gate_name: str, experts: nn.Module | None
    ):
        self.name, self.num_experts, self.gate, self.gate_name = name, num_experts, gate, gate_name
        self.experts = experts

    @property
    def gate_parameters(self) -> dict[str, nn.Parameter]:
        """What decides the routes; empty for hash gates."""
        return {} if self.gate is None else dict(self.gate.named_parameters())

    @property
    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """Those of the routed experts."""
        return {} if self.experts is None else dict(self.experts.named_parameters())

    @property
    def library_gate(self) -> Gate | None:
        """The gate of this library that routes, if one does."""
        modules = () if self.gate is None else self.gate.modules()
        return next((module for module in modules if isinstance(module, Gate)), None)

    @cached_property
    def equivalent_gate(self) -> TopKGate | None:
        """A TopKGate that gives the same weights for the same logits; None if there is none."""
        gate: Any = self.library_gate
        while isinstance(gate, RegularizedGate):  # which changes no weight
            gate = gate.gate
        return gate if isinstance(gate, TopKGate) else None

    @abstractmethod
    def attach(self, visit: Visit) -> list[RemovableHandle]:
        """Show each call to ``visit`` until the handles are removed."""

    @property
    def can_run_experts(self) -> bool:
        """Whether :meth:`run` can run single experts."""
        return False

    def run(self, expert: int, rows: Tensor) -> Tensor:
        """The output of one expert: (m, p) -> (m, u)."""
        raise NotImplementedError

    def _call(
        self, inputs: Tensor, weights: Tensor, logits: Tensor | None, mask: Tensor | None = None
    ) -> Call:
        rows, tokens = inputs.reshape(-1, inputs.shape[-1]), self.tokens
        if tokens is None or tokens.position.numel() != len(rows):
            tokens = Tokens.of(inputs.shape[:-1], mask, inputs.device)
        if logits is not None:
            logits = logits.reshape(-1, self.num_experts) if logits.numel() == weights.numel() else None
        return Call(rows, Routing(weights=weights.reshape(-1, self.num_experts), logits=logits), tokens)


class GatedMixture(Mixture):
    """A gate of this library, with the experts of the mixture that it is in."""

    def __init__(self, name: str, gate: Gate, experts: nn.Module | None):
        super().__init__(name, gate.num_experts, gate, name, experts)

    def attach(self, visit: Visit) -> list[RemovableHandle]:
        """A hook after the gate."""

        def hook(gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any], routing: Routing) -> Any:
            x, mask = args[0] if args else kwargs["x"], kwargs.get("mask")
            routing = routing.masked(mask)  # as after this hook
            call = self._call(x, routing.weights, routing.logits, mask)
            call.routing.candidates = routing.candidates
            changed = visit(self, call)
            return None if changed is None else routing.with_weights(changed.reshape(routing.weights.shape))

        assert self.gate is not None
        return [self.gate.register_forward_hook(hook, with_kwargs=True)]

    @property
    def can_run_experts(self) -> bool:
        """Experts that read what the gate reads."""
        return isinstance(self.experts, Experts) and self.experts.input_rank == 1

    def run(self, expert: int, rows: Tensor) -> Tensor:
        """As the mixture runs it, with weight 1."""
        weights = rows.new_zeros(len(rows), self.num_experts)
        weights[:, expert] = 1
        assert isinstance(self.experts, Experts)
        return run_experts(self.experts, rows, [Routing(weights=weights)], "sparse", 1.0).squeeze(1)


class _ExternalMixture(Mixture):
    """A mixture whose router is not of this library, or is in the place of such a one."""

    def __init__(
        self,
        name: str,
        num_experts: int,
        gate: nn.Module | None,
        gate_name: str,
        experts: nn.Module | None,
        *,
        adapter: RouterAdapter,
        owner: nn.Module,
    ):
        super().__init__(name, num_experts, gate, gate_name, experts)
        self.adapter, self.owner = adapter, owner

    @cached_property
    def equivalent_gate(self) -> TopKGate | None:
        """That of the gate of this library, or a copy of the router."""
        if self.gate is None or self.library_gate is not None:
            return super().equivalent_gate
        try:
            return copy_router(self.gate, self.adapter, self.owner)
        except ValueError:
            return None


class RoutedExperts(_ExternalMixture):
    """A module of experts that gets the selected experts and their weights, and the router beside it."""

    _is_own_call = False
    _logits: Tensor | None = None

    def attach(self, visit: Visit) -> list[RemovableHandle]:
        """A hook before the experts, and one after the router."""
        experts: Any = self.experts
        names = _argument_names(experts)
        assert names is not None

        def keep(router: nn.Module, args: Any, output: Any) -> None:
            self._logits = _find_logits(output if isinstance(output, tuple) else (output,), self.num_experts)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._is_own_call:
                return None
            inputs, index, weight = (
                args[place] if place < len(args) else kwargs[name] for place, name in enumerate(names)
            )
            logits, self._logits = self._logits, None
            changed = visit(self, self._call(inputs, to_dense(index, weight, self.num_experts), logits))
            if changed is None:
                return None
            new_weight, new_index = _top(changed, index.shape[-1])
            return (inputs, new_index.to(index.dtype), new_weight.to(weight.dtype)), {}

        handles = [experts.register_forward_pre_hook(hook, with_kwargs=True)]
        return handles if self.gate is None else [*handles, self.gate.register_forward_hook(keep)]

    @property
    def can_run_experts(self) -> bool:
        """Always."""
        return True

    def run(self, expert: int, rows: Tensor) -> Tensor:
        """One expert with weight 1, by the module's own implementation."""
        # Two slots, the second with weight 0: some modules drop the dimension of a single one (LongCat).
        index = torch.full((len(rows), 2), expert, device=rows.device)
        weights = rows.new_tensor([1.0, 0.0]).expand(len(rows), 2)
        experts: Any = self.experts
        self._is_own_call = True
        try:
            output: Tensor = experts(rows, index, weights)
        finally:
            self._is_own_call = False
        return output


class AdaptedRouter(_ExternalMixture):
    """A router whose experts have another form; its adapter reads and writes what it returns."""

    def attach(self, visit: Visit) -> list[RemovableHandle]:
        """A hook after the router."""

        def hook(router: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            weights, experts = self.adapter.routes(output)
            others = (one for one in output if one is not weights and one is not experts)
            logits = _find_logits(others, self.num_experts)
            changed = visit(self, self._call(args[0], to_dense(experts, weights, self.num_experts), logits))
            if changed is None:
                return None
            assert logits is not None
            return self.adapter.output(logits, *_top(changed, self.adapter.sizes(router).k))

        assert self.gate is not None
        return [self.gate.register_forward_hook(hook)]


def to_dense(index: Tensor, weight: Tensor, num_experts: int) -> Tensor:
    """(N, k) experts and weights -> (N, n). Experts beyond the last, such as identities, are left out."""
    slots = weight.new_zeros(len(weight), num_experts + 1)
    return slots.scatter_add(1, index.long().clamp_max(num_experts), weight)[:, :num_experts]


def _top(weights: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Weights and experts (N, k) of (N, n), with at least ``slots``."""
    most = int(weights.count_nonzero(-1).max()) if len(weights) else 0
    top = weights.topk(min(max(slots, most), weights.shape[-1]), -1)
    return top.values, top.indices


def _find_logits(values: Iterable[object], num_experts: int) -> Tensor | None:
    """The first of ``values`` that has a number for each expert."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1:] == (num_experts,):
            return value
    return None


def find_mixtures(model: nn.Module, adapter: RouterAdapter | None = None) -> list[Mixture]:
    """All mixtures of ``model`` in its order.

    Args:
        model: with gates of this library, with routers of transformers, or with both.
        adapter: for routers of another form; by default that of the family of the model.

    Raises:
        CometError: there are none.

    Example:
        >>> from comet_moe import MoE
        >>> from comet_moe.audit import find_mixtures
        >>> from comet_moe.experts import DenseExperts
        >>> from comet_moe.gates import TopKGate
        >>> moe = MoE(experts=DenseExperts(4, 8, 8), gate=TopKGate(8, 4, k=1))
        >>> [(mixture.name, mixture.num_experts) for mixture in find_mixtures(moe)]
        [('gates.0', 4)]
    """
    found: dict[str, Mixture] = {mixture.name: mixture for mixture in find_routed(model, adapter)}
    inside = {module for mixture in found.values() if mixture.gate for module in mixture.gate.modules()}
    modules = dict(model.named_modules())
    for name, gate, _ in outermost_gates(model):
        if gate not in inside:
            # mixture.gates.0, or mixture.router.gate for one that is a router in a model of transformers
            owner = modules.get(name.rpartition(".")[0].rpartition(".")[0])
            found[name] = GatedMixture(name, gate, getattr(owner, "experts", None))
    if not found:
        raise CometError(
            f"{type(model).__name__} has no mixtures of experts: give a model with gates of comet_moe.gates, "
            "or with experts that take indices and weights"
        )
    order = {name: place for place, name in enumerate(modules)}
    return [found[name] for name in sorted(found, key=lambda name: order.get(name, len(order)))]


def find_routed(model: nn.Module, adapter: RouterAdapter | None = None) -> list[_ExternalMixture]:
    """The mixtures of ``model`` that are not of this library, their routers replaced or not."""
    adapter = adapter or find_adapter(model)
    modules = dict(model.named_modules())
    found: list[_ExternalMixture] = []
    for name, module in modules.items():
        if name and _argument_names(module):
            parent, n = name.rpartition(".")[0], _count_experts(module)
            gate_name = _find_router(modules, name, n)
            gate = modules[gate_name] if gate_name else None
            owner = modules[gate_name.rpartition(".")[0]] if gate else modules[parent]
            own = (parent or name, n, gate, gate_name, module)
            found.append(RoutedExperts(*own, adapter=adapter, owner=owner))
    known = {mixture.gate for mixture in found}
    for name, module in modules.items():
        if module not in known and adapter.is_router(name, module):
            parent = name.rpartition(".")[0]
            owner = modules[parent]
            experts = getattr(owner, "experts", None)
            own = (parent or name, RouterSizes(*adapter.sizes(module)).num_experts, module, name, experts)
            found.append(AdaptedRouter(*own, adapter=adapter, owner=owner))
    return found


def _count_experts(experts: Any) -> int:
    """n: the attribute ``num_experts``, the length of a list, or the size of the stacked weights."""
    number = getattr(experts, "num_experts", None)
    if isinstance(number, int):
        return number
    return len(experts if isinstance(experts, nn.ModuleList) else next(experts.parameters()))


def _argument_names(module: nn.Module) -> tuple[str, str, str] | None:
    """The first three arguments of a module of experts; None for other modules."""
    return _first_arguments(type(module).forward)


@lru_cache
def _first_arguments(forward: Callable[..., Any]) -> tuple[str, str, str] | None:
    names = list(inspect.signature(forward).parameters)[1:]  # of the function that a decorator wraps
    if len(names) < 3 or names[1] not in INDEX_NAMES or names[2] not in WEIGHT_NAMES:
        return None
    return names[0], names[1], names[2]


def _find_router(modules: dict[str, nn.Module], name: str, num_experts: int) -> str:
    """The name of the router beside the experts, or beside their parent; or "".

    A child is the router if its name is ``gate`` or ``router``. So is one that contains a gate of this
    library, or that has a matrix with one row per expert.
    """
    own = name
    while own:
        parent = own.rpartition(".")[0]
        for child_name, child in modules[parent].named_children():
            path = f"{parent}.{child_name}" if parent else child_name
            if path == own or "expert" in child_name:
                continue
            is_router = child_name in ROUTER_NAMES or any(
                isinstance(module, Gate) for module in child.modules()
            )
            if is_router or any(
                len(weight) == num_experts for weight in child.parameters() if weight.dim() == 2
            ):
                return path
        if parent.rpartition(".")[2].isdigit() or own != name:
            return ""
        own = parent
    return ""


@contextmanager
def visiting(model: nn.Module, mixtures: Sequence[Mixture], visit: Visit) -> Iterator[None]:
    """Show each call of ``mixtures`` to ``visit`` within the block.

    The mask and the positions of tokens come from the arguments of the model: ``attention_mask`` (B, T), and
    ``position_ids`` of packed sequences.
    """
    with ExitStack() as hooks:
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        if "input_ids" in names or "kwargs" in names:

            def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                tokens = _read_tokens(dict(zip(names, args, strict=False)) | kwargs)
                for mixture in mixtures:
                    mixture.tokens = tokens

            hooks.callback(model.register_forward_pre_hook(read, with_kwargs=True).remove)
        for mixture in mixtures:
            for handle in mixture.attach(visit):
                hooks.callback(handle.remove)
        try:
            yield
        finally:
            for mixture in mixtures:
                mixture.tokens = None


def _read_tokens(given: dict[str, Any]) -> Tokens | None:
    like, embeddings = given.get("input_ids"), given.get("inputs_embeds")
    if like is None and embeddings is not None:
        like = embeddings[..., 0]
    if not isinstance(like, Tensor) or like.dim() != 2:
        return None
    length, mask, position = like.shape[1], given.get("attention_mask"), given.get("position_ids")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= length:
        mask = mask[:, -length:] != 0  # with a cache the mask is also of tokens of earlier passes
        mask = None if bool(mask.all()) else mask
    else:
        mask = None
    tokens = Tokens.of(like.shape, mask, like.device)
    if isinstance(position, Tensor) and position.shape[-1] == length and position.dim() <= 2:
        return Tokens(tokens.shape, tokens.mask, position.expand(like.shape).flatten())
    return tokens
