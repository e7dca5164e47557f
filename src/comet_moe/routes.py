"""Record the experts of every token, and run a model with recorded ones.

Shapes: B sequences of T tokens, L layers with a gate or router, n experts, k slots.

An inference server exports the experts that it chose as one integer array per sequence, (length, L, k), -1
where a slot is unset. :func:`record` makes such arrays, :func:`replay` runs a model with them. Two engines
disagree about some of the routes, so reinforcement learning replays the server's routes in training.

The choice is replayed, the weights are the model's own: with S the given experts of a token,

- the gates and routers that are a :class:`~comet_moe.gates.TopKGate` compute the weights of S as if they had
  chosen S;
- others keep their weights g_i of the experts in S, times Σ_j g_j / Σ_{j in S} g_j, a factor without
  gradient. If they give S no weight at all, all experts of S get the same.

Gradients flow through the weights and not through the choice. Tokens whose slots are all -1 are routed by the
model.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from comet_moe import checks
from comet_moe.gates import RegularizedGate, TopKGate
from comet_moe.mixture.find import outermost_gates
from comet_moe.routing import Routing

Route = np.ndarray[Any, np.dtype[np.int32]]
"""(length, L, k)"""

FINDERS: list[Callable[[nn.Module], Iterable[tuple[str, nn.Module, Any, TopKGate | None]]]] = []
"""Functions that find the routers of a model that are no gates; :mod:`comet_moe.hf` adds its own.

Each router has a name, an adapter, and a gate that weighs experts as it does, or None.
"""


class _Layer(NamedTuple):
    """A gate or router: how to read what it returned, to write it, and to weigh other experts."""

    name: str
    module: nn.Module
    adapter: Any
    formula: TopKGate | None

    def read(self, output: Any) -> tuple[Tensor, Tensor | None]:
        """(N, n) weights and logits."""
        if self.adapter is None:
            n = output.num_experts
            logits = None if output.logits is None else output.logits.reshape(-1, n)
            return output.weights.reshape(-1, n), logits
        weights, experts = self.adapter.routes(output)
        logits = next(part for part in output if part is not weights and part is not experts)
        n = self.adapter.sizes(self.module).num_experts
        return weights.new_zeros(len(weights), n).scatter(-1, experts, weights), logits.reshape(-1, n)

    def write(self, output: Any, weights: Tensor, logits: Tensor | None, slots: int) -> Any:
        """``output`` with other ``weights`` (N, n), at most ``slots`` per row."""
        if self.adapter is None:
            return output.with_weights(weights.reshape(*output.batch_shape, -1))
        slots = min(max(slots, self.adapter.sizes(self.module).k), weights.shape[-1])
        return self.adapter.output(logits, *weights.topk(slots, -1))

    def weigh(self, experts: Tensor, own: Tensor, logits: Tensor | None) -> Tensor:
        """The weights (N, n) for ``experts`` (N, k), -1 where unset."""
        is_set, index = experts >= 0, experts.clamp_min(0)
        if self.formula is not None and logits is not None:
            selected = logits.gather(-1, index).masked_fill(~is_set, -torch.inf)
            selected = selected.masked_fill(~is_set.any(-1, keepdim=True), 0.0)  # no row of -inf only
            weights = self.formula._weights(selected, logits)
        else:
            weights = own.gather(-1, index).masked_fill(~is_set, 0.0)
            total, sums = own.detach().sum(-1, keepdim=True), weights.detach().sum(-1, keepdim=True)
            scaled = weights * (total / sums.masked_fill(sums == 0, 1.0))
            equal = total / is_set.sum(-1, keepdim=True).clamp_min(1)
            weights = torch.where(sums == 0, equal, scaled)
        weights = weights.to(own.dtype).masked_fill(~is_set, 0.0)
        chosen = torch.zeros_like(own).scatter_add(-1, index, weights)
        return torch.where(is_set.any(-1, keepdim=True), chosen, own)


@contextmanager
def record(model: nn.Module) -> Iterator[list[Route]]:
    """Within the block, the experts of each forward pass of ``model`` are added to the list that this gives.

    A pass over B sequences adds B integer arrays (T, L, k), ordered by weight, -1 in unused slots and for
    padding. Layers are in the order of ``model.modules()``. A model without sequences, with rows (B, p), adds
    one array (B, L, k).

    Args:
        model: any module with gates of this library, or a mixture of transformers (``import comet_moe.hf``).

    Example:
        >>> import torch
        >>> from comet_moe import MoE, record, replay
        >>> from comet_moe.experts import DenseExperts
        >>> from comet_moe.gates import TopKGate
        >>> moe = MoE(experts=DenseExperts(4, 8, 8), gate=TopKGate(8, 4, k=2), return_routing=False)
        >>> x = torch.randn(3, 5, 8)
        >>> with record(moe) as routes:
        ...     y = moe(x)
        >>> len(routes), routes[0].shape
        (3, (5, 1, 2))
        >>> with replay(moe, routes):
        ...     again = moe(x)
        >>> torch.allclose(again, y, atol=1e-5)
        True
    """
    layers = _find_layers(model)
    routes: list[Route] = []
    chosen: dict[str, Tensor] = {}
    batch = _Batch(model)

    def read(layer: _Layer, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        batch.see(output, kwargs.get("mask"))
        weights, _ = layer.read(output)
        most = max(1, int(weights.count_nonzero(-1).max())) if len(weights) else 1
        top, experts = weights.detach().topk(most, -1)
        chosen[layer.name] = experts.masked_fill(top == 0, -1)

    def finish(module: nn.Module, args: Any, output: Any) -> None:
        routes.extend(batch.split([chosen[layer.name] for layer in layers if layer.name in chosen]))
        chosen.clear()

    with ExitStack() as hooks:
        batch.hook(hooks)
        for layer in layers:
            hook = layer.module.register_forward_hook(partial(read, layer), with_kwargs=True)
            hooks.callback(hook.remove)
        hooks.callback(model.register_forward_hook(finish).remove)
        yield routes


@contextmanager
def replay(model: nn.Module, routes: Iterable[Any]) -> Iterator[None]:
    """Within the block, ``model`` sends its tokens to the experts of ``routes``, see :mod:`comet_moe.routes`.

    Each forward pass over B sequences takes the next B arrays. An array has one row per token of the padded
    batch, or one per token that is not padding.

    Args:
        model: as for :func:`record`; a pass must be followed by its backward pass before the next one if
            gradients are checkpointed.
        routes: integer arrays (length, L, k), of :func:`record` or of an inference server.
    """
    layers = _find_layers(model)
    left = [_check_route(route, len(layers), number) for number, route in enumerate(routes)]
    left.reverse()
    batch = _Batch(model)
    taken: list[Tensor] = []

    def start(module: nn.Module, args: Any) -> None:
        taken.clear()

    def change(number: int, layer: _Layer, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        batch.see(output, kwargs.get("mask"))
        own, logits = layer.read(output)
        if not taken:
            taken.append(batch.join(left, len(own)))
        experts = taken[0][:, number].to(own.device)
        if experts.numel() and int(experts.max()) >= own.shape[-1]:
            raise ValueError(
                f"the routes have the expert {int(experts.max())} in layer {number}, {layer.name} has "
                f"{own.shape[-1]}: replay routes of the same model"
            )
        return layer.write(output, layer.weigh(experts, own, logits), logits, experts.shape[-1])

    with ExitStack() as hooks:
        batch.hook(hooks)
        hooks.callback(model.register_forward_pre_hook(start).remove)
        for number, layer in enumerate(layers):
            hook = layer.module.register_forward_hook(partial(change, number, layer), with_kwargs=True)
            hooks.callback(hook.remove)
        yield


def route_drift(before: Sequence[Route], after: Sequence[Route]) -> float:
    """The share of the experts in ``before`` that are not in ``after``, over tokens and layers.

    Args:
        before, after: routes of the same tokens, of :func:`record`.
    """
    kept = total = 0
    for one, other in zip(before, after, strict=True):
        is_set = one >= 0
        kept += int(((one[..., :, None] == other[..., None, :]).any(-1) & is_set).sum())
        total += int(is_set.sum())
    return 1 - kept / total if total else 0.0


def _find_layers(model: nn.Module) -> list[_Layer]:
    """The gates and routers of ``model``, in its order."""
    checks.require_type("model", model, nn.Module)
    found: dict[nn.Module, _Layer] = {}
    for name, gate, _ in outermost_gates(model):
        inner: Any = gate
        while isinstance(inner, RegularizedGate):  # which changes no weight
            inner = inner.gate
        found[gate] = _Layer(name, gate, None, inner if isinstance(inner, TopKGate) else None)
    for find in FINDERS:
        for name, router, adapter, formula in find(model):
            found[router] = _Layer(name, router, adapter, formula)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no gate of comet_moe.gates; for routers of transformers, import "
            "comet_moe.hf first"
        )
    return [found[module] for module in model.modules() if module in found]


class _Batch:
    """The shape and the padding of the current forward pass."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._parameters = inspect.signature(model.forward)
        self._shape: tuple[int, int] | None = None
        self._mask: Tensor | None = None

    def hook(self, hooks: ExitStack) -> None:
        """Read the arguments of each pass, as models of transformers have them."""
        hooks.callback(self._model.register_forward_pre_hook(self._start, with_kwargs=True).remove)

    def _start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = self._parameters.bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        self._shape = self._mask = None
        if isinstance(tokens, Tensor) and tokens.dim() > 1:
            self._shape = (tokens.shape[0], tokens.shape[1])
            mask = given.get("attention_mask")
            if isinstance(mask, Tensor) and mask.dim() == 2:
                self._mask = mask[:, -tokens.shape[1] :] != 0  # with a cache also of earlier passes

    def see(self, output: Any, mask: Tensor | None) -> None:
        """Read the shape of a routing and the mask that the gate got, for other models."""
        if isinstance(output, Routing) and self._shape is None:
            rows = tuple(output.batch_shape)
            self._shape = (rows[0], rows[1]) if len(rows) == 2 else (1, rows[0] if len(rows) == 1 else -1)
            self._mask = None if mask is None else mask.reshape(self._shape)

    def split(self, chosen: Sequence[Tensor]) -> list[Route]:
        """Experts (B·T, k) of each layer -> B arrays (T, L, k)."""
        if not chosen or self._shape is None:
            return []
        slots = max(experts.shape[-1] for experts in chosen)
        rows = {len(experts) for experts in chosen}
        if rows != {self._shape[0] * self._shape[1]}:
            raise ValueError(
                f"the batch has {self._shape[0]} sequences of {self._shape[1]} tokens, and its gates route "
                f"{', '.join(map(str, sorted(rows)))} rows: routes are recorded if there is one row per token"
            )
        padded = [nn.functional.pad(experts, (0, slots - experts.shape[-1]), value=-1) for experts in chosen]
        routes = torch.stack(padded, 1).reshape(*self._shape, len(chosen), slots)
        if self._mask is not None:
            routes = routes.masked_fill(~self._mask[..., None, None].to(routes.device), -1)
        return list(routes.to(torch.int32).cpu().numpy())

    def join(self, left: list[Tensor], rows: int) -> Tensor:
        """The next B arrays, which leave ``left``, as (B·T, L, k)."""
        sequences, length = self._shape or (1, rows)
        if rows != sequences * length:
            raise ValueError(
                f"the batch has {sequences} sequences of {length} tokens, and a gate routes {rows} rows: "
                "routes are replayed if there is one row per token"
            )
        if len(left) < sequences:
            raise ValueError(
                f"the forward pass has {sequences} sequences, and {len(left)} arrays of routes are left: "
                "pass one per sequence and pass"
            )
        routes = [left.pop() for _ in range(sequences)]
        slots = max(route.shape[-1] for route in routes)
        joined = torch.full((sequences, length, routes[0].shape[1], slots), -1)
        for number, route in enumerate(routes):
            real = torch.ones(length, dtype=torch.bool)
            if self._mask is not None:
                real = self._mask[number].cpu()
            if len(route) == length:
                joined[number, :, :, : route.shape[-1]] = route
            elif len(route) == int(real.sum()):
                joined[number, real, :, : route.shape[-1]] = route
            else:
                raise ValueError(
                    f"the routes of sequence {number} have {len(route)} tokens, the sequence has "
                    f"{int(real.sum())}, and {length} with padding: pass one row per token"
                )
        return joined.flatten(0, 1)


def _check_route(route: Any, layers: int, number: int) -> Tensor:
    """``route`` as an int64 tensor (length, L, k); ValueError if it is none."""
    values = torch.as_tensor(route)
    if values.dim() != 3 or values.is_floating_point() or values.dtype == torch.bool:
        raise ValueError(
            f"routes[{number}] must be an integer array (length, layers, k), got {values.dtype} of shape "
            f"{tuple(values.shape)}"
        )
    if values.shape[1] != layers:
        raise ValueError(f"routes[{number}] has {values.shape[1]} layers, the model has {layers}")
    values = values.long()
    if values.numel() and int(values.min()) < -1:
        raise ValueError(f"routes[{number}] has the expert {int(values.min())}: an unset slot is -1")
    ordered = values.sort(-1).values
    if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
        raise ValueError(f"routes[{number}] has an expert twice for one token: each may be there once")
    return values
