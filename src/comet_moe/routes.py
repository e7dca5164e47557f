"""Record the experts of every token, and run a model with recorded ones.

Shapes: B sequences of T tokens, L mixtures, N = B·T rows, n experts, k slots.

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

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from comet_moe import checks
from comet_moe.mixture.visits import Call, Mixture, find_mixtures, visiting

Route = np.ndarray[Any, np.dtype[np.int32]]
"""(length, L, k)"""


@contextmanager
def record(model: nn.Module) -> Iterator[list[Route]]:
    """Within the block, the experts of each forward pass of ``model`` are added to the list that this gives.

    A pass over B sequences adds B integer arrays (T, L, k), ordered by weight, -1 in unused slots and for
    padding. Mixtures are in the order of ``model.modules()``. A model without sequences, with rows (B, p),
    adds one array (B, L, k).

    Args:
        model: any module with gates of this library, or with routers of transformers.

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
    checks.require_type("model", model, nn.Module)
    mixtures = find_mixtures(model)
    routes: list[Route] = []
    chosen: dict[str, Tensor] = {}

    def read(mixture: Mixture, call: Call) -> None:
        sequences, length = _shape(mixture, call)
        weights = call.routing.weights.detach()
        most = max(1, int(weights.count_nonzero(-1).max())) if len(weights) else 1
        top, experts = weights.topk(most, -1)
        experts = experts.masked_fill(top == 0, -1)
        if call.tokens.mask is not None:
            experts = experts.masked_fill(~call.tokens.mask.unsqueeze(-1), -1)
        chosen[mixture.name] = experts.reshape(sequences, length, most).to("cpu", torch.int32)

    def finish(module: nn.Module, args: Any, output: Any) -> None:
        if chosen:
            rows = next(iter(chosen.values()))[..., :1]
            # A mixture may have no call, such as one for images.
            layers = [chosen.get(mixture.name, torch.full_like(rows, -1)) for mixture in mixtures]
            slots = max(layer.shape[-1] for layer in layers)
            padded = [nn.functional.pad(layer, (0, slots - layer.shape[-1]), value=-1) for layer in layers]
            routes.extend(torch.stack(padded, 2).numpy())
        chosen.clear()

    with visiting(model, mixtures, read), ExitStack() as hooks:
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
    checks.require_type("model", model, nn.Module)
    mixtures = find_mixtures(model)
    number = {mixture.name: place for place, mixture in enumerate(mixtures)}
    left = [_check_route(route, len(mixtures), place) for place, route in enumerate(routes)]
    left.reverse()
    taken: list[Tensor] = []

    def start(module: nn.Module, args: Any) -> None:
        taken.clear()

    def change(mixture: Mixture, call: Call) -> Tensor:
        if not taken:
            taken.append(_join(left, *_shape(mixture, call), call.tokens.mask))
        experts = taken[0][:, number[mixture.name]].to(call.inputs.device)
        if experts.numel() and int(experts.max()) >= mixture.num_experts:
            raise ValueError(
                f"the routes have the expert {int(experts.max())} in layer {number[mixture.name]}, "
                f"{mixture.name} has {mixture.num_experts}: replay routes of the same model"
            )
        return weigh(mixture, call, experts)

    with ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(start).remove)
        hooks.enter_context(visiting(model, mixtures, change))
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


def _shape(mixture: Mixture, call: Call) -> tuple[int, int]:
    """B and T; rows that are no sequences are one."""
    rows, tokens = len(call.inputs), mixture.tokens
    if tokens is not None and tokens.position.numel() != rows:
        sequences, length = tokens.shape
        raise ValueError(
            f"the batch has {sequences} sequences of {length} tokens, and {mixture.name} routes {rows} rows: "
            "routes are recorded and replayed if there is one row per token"
        )
    shape = call.tokens.shape
    return (shape[0], shape[1]) if len(shape) == 2 else (1, rows)


def weigh(mixture: Mixture, call: Call, experts: Tensor) -> Tensor:
    """The weights (N, n) for given ``experts`` (N, k), -1 where unset, see :mod:`comet_moe.routes`."""
    own, logits = call.routing.weights, call.routing.logits
    is_set, index = experts >= 0, experts.clamp_min(0)
    if mixture.equivalent_gate is not None and logits is not None:
        selected = logits.gather(-1, index).masked_fill(~is_set, -torch.inf)
        selected = selected.masked_fill(~is_set.any(-1, keepdim=True), 0.0)  # no row of -inf only
        weights = mixture.equivalent_gate._weights(selected, logits)
    else:
        weights = own.gather(-1, index).masked_fill(~is_set, 0.0)
        total, sums = own.detach().sum(-1, keepdim=True), weights.detach().sum(-1, keepdim=True)
        scaled = weights * (total / sums.masked_fill(sums == 0, 1.0))
        equal = total / is_set.sum(-1, keepdim=True).clamp_min(1)
        weights = torch.where(sums == 0, equal, scaled)
    weights = weights.to(own.dtype).masked_fill(~is_set, 0.0)
    chosen = torch.zeros_like(own).scatter_add(-1, index, weights)
    return torch.where(is_set.any(-1, keepdim=True), chosen, own)


def _join(left: list[Tensor], sequences: int, length: int, mask: Tensor | None) -> Tensor:
    """The next B arrays, which leave ``left``, as (N, L, k)."""
    if len(left) < sequences:
        raise ValueError(
            f"the forward pass has {sequences} sequences, and {len(left)} arrays of routes are left: pass "
            "one per sequence and pass"
        )
    routes = [left.pop() for _ in range(sequences)]
    slots = max(route.shape[-1] for route in routes)
    joined = torch.full((sequences, length, routes[0].shape[1], slots), -1)
    real = torch.ones(sequences, length, dtype=torch.bool) if mask is None else mask.cpu()
    for number, (route, is_real) in enumerate(zip(routes, real.reshape(sequences, length), strict=True)):
        if len(route) == length:
            joined[number, :, :, : route.shape[-1]] = route
        elif len(route) == int(is_real.sum()):
            joined[number, is_real, :, : route.shape[-1]] = route
        else:
            raise ValueError(
                f"the routes of sequence {number} have {len(route)} tokens, the sequence has "
                f"{int(is_real.sum())}, and {length} with padding: pass one row per token"
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
