"""The groups of an optimiser, and what happens to its state when parameters become several copies."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comet_moe import checks
from comet_moe.gates.base import Gate
from comet_moe.local_search.permutation import Permutation

_BY_GROUP = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "lr_lambdas")
"""Attributes of learning-rate schedulers with one value per group of the optimiser."""


def parameter_groups(
    model: nn.Module, lr: float, gate_lr: float | None = None, gate_weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Optimiser groups of ``model``: the gates without weight decay, the rest as the optimiser says.

    Weights that are spread over ranks have groups of their own: fused optimisers take one kind at a time.

    Args:
        model: the model.
        lr: learning rate of all parameters that are not in a gate.
        gate_lr: learning rate of the gates; None means ``lr``.
        gate_weight_decay: weight decay of the gates; it would pull their logits toward equal weights.

    Returns:
        Up to three kinds of groups. The U of a local search is at ``lr`` times the ``lr_factor`` of the
        search; its weight decay is that of the gates.

    Example:
        >>> import torch
        >>> from comet_moe import MoE, parameter_groups
        >>> from comet_moe.experts import DenseExperts
        >>> from comet_moe.gates import TopKGate
        >>> moe = MoE(experts=DenseExperts(4, 8, 8), gate=TopKGate(8, 4, k=2))
        >>> optimizer = torch.optim.AdamW(parameter_groups(moe, lr=1e-3, gate_lr=3e-3), weight_decay=0.1)
        >>> [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        [(0.001, 0.1), (0.003, 0.0)]
    """
    checks.require_type("model", model, nn.Module)
    checks.not_negative("lr", lr)
    gate_lr = lr if gate_lr is None else checks.not_negative("gate_lr", gate_lr)
    checks.not_negative("gate_weight_decay", gate_weight_decay)
    factors = search_factors(model)
    gates = {id(p) for module in model.modules() if isinstance(module, Gate) for p in module.parameters()}
    groups: dict[tuple[float, bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        own = id(parameter)
        rate = lr * factors[own] if own in factors else gate_lr if own in gates else lr
        is_of_gate = own in factors or own in gates
        groups.setdefault((rate, is_of_gate, hasattr(parameter, "to_local")), []).append(parameter)
    return [
        {"params": params, "lr": rate} | ({"weight_decay": gate_weight_decay} if is_of_gate else {})
        for (rate, is_of_gate, _), params in groups.items()
    ]


def search_factors(model: nn.Module) -> dict[int, float]:
    """The learning rate of the U of each local search in ``model``, relative to that of the model, by id."""
    return {id(m.logits): m.lr_factor for m in model.modules() if isinstance(m, Permutation)}


Slice = tuple[int, Tensor]
"""A dimension of a parameter, and the places in it."""


class Growth:
    """What an optimiser has to know of a model whose layers have become copies behind gates.

    Args:
        optimizer: of the model.
        scheduler: of ``optimizer``, or None.
        gate_lr: learning rate of the new gates at the rate that the optimiser was made with; it follows the
            same schedule. Such gates have a group of their own, without weight decay. With None they join the
            group of their layer.
    """

    def __init__(self, optimizer: Optimizer, scheduler: Any = None, gate_lr: float | None = None):
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.gate_lr = None if gate_lr is None else checks.not_negative("gate_lr", gate_lr)
        if gate_lr is not None:
            self._require_scheduler("gate_lr")

    def _require_scheduler(self, cause: str) -> None:
        if self.scheduler is None and "initial_lr" in self.optimizer.param_groups[0]:
            raise ValueError(
                f"{cause} adds a group to an optimiser whose learning rate has a schedule: pass scheduler as "
                "well, or leave it out"
            )

    def apply(
        self,
        copies: Mapping[nn.Parameter, Sequence[nn.Parameter]],
        gates: nn.Module,
        slices: Mapping[nn.Parameter, Slice] | None = None,
    ) -> None:
        """Replace parameters by their copies, with their state, and add the parameters of ``gates``.

        Args:
            copies: by parameter of a layer, the new parameters in its place. Each has its shape, or the
                shape to which it is broadcast, such as (n, out, in) for (out, in) or (1, out, in). Or it has
                a part of it, broadcast as well.
            gates: the gates of this layer.
            slices: by new parameter that has only a part of the old one, which part.
        """
        if any(factor != 1 for factor in search_factors(gates).values()):
            self._require_scheduler("a local search with an lr_factor")
        group_of = {p: i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        own_group = next((group_of[p] for p in copies if p in group_of), 0)
        states: dict[Tensor, Any] = {
            new: {
                name: _copy_value(name, value, old, new, (slices or {}).get(new))
                for name, value in self.optimizer.state[old].items()
            }
            for old, all_new in copies.items()
            if old in self.optimizer.state
            for new in all_new
        }
        for old in copies:
            self.optimizer.state.pop(old, None)
        self.optimizer.state.update(states)
        for group in self.optimizer.param_groups:
            group["params"] = [new for old in group["params"] for new in copies.get(old, (old,))]
        self._add(gates, own_group)

    def _add(self, gates: nn.Module, like: int) -> None:
        """Add the parameters of ``gates`` to the group ``like``, or to new ones that follow its schedule."""
        group = self.optimizer.param_groups[like]
        base = float(group.get("initial_lr", group["lr"]))
        factors = search_factors(gates)
        by_ratio: dict[float | None, list[nn.Parameter]] = {}
        for parameter in gates.parameters():
            ratio = None  # joins the group
            if id(parameter) in factors:
                ratio = factors[id(parameter)] if factors[id(parameter)] != 1 else None
            elif self.gate_lr is not None:
                ratio = self.gate_lr / base
            by_ratio.setdefault(ratio, []).append(parameter)
        group["params"] = [*group["params"], *by_ratio.pop(None, [])]
        for ratio, parameters in by_ratio.items():
            assert ratio is not None
            rates: dict[str, Any] = {
                name: group[name] * ratio
                for name in ("lr", "initial_lr", "max_lr", "min_lr")
                if name in group
            }
            self.optimizer.param_groups.append({**group, **rates, "params": parameters, "weight_decay": 0.0})
            for scheduler in _with_inner(self.scheduler):
                _add_group(scheduler, like, ratio)


def _with_inner(scheduler: Any) -> Iterator[Any]:
    """``scheduler`` and those that it runs, as ``SequentialLR`` does; nothing for None."""
    if scheduler is not None:
        yield scheduler
        for inner in getattr(scheduler, "_schedulers", ()):
            yield from _with_inner(inner)


def _add_group(scheduler: Any, like: int, ratio: float) -> None:
    """One more group for ``scheduler``, whose rates are ``ratio`` times those of the group ``like``."""
    for name in _BY_GROUP:
        values = getattr(scheduler, name, None)
        if isinstance(values, list):  # several schedulers may hold the same list, so it is not changed
            value = values[like]
            setattr(scheduler, name, [*values, value if callable(value) or value is None else value * ratio])


def _copy_value(name: str, value: Any, old: nn.Parameter, new: nn.Parameter, part: Slice | None) -> Any:
    """A value of the optimiser's state of ``old``, for ``new``."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if part is not None and value.shape == old.shape:
        dimension, places = part
        return value.index_select(dimension, places.to(value.device)).expand_as(new).clone()
    if new.shape == old.shape or value.dim() == 0:  # a count of steps has no dimension
        return value.clone()
    if value.shape != old.shape:
        raise ValueError(
            f"the optimiser keeps {name} of shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(old.shape)}, which cannot be copied for stacked experts: use Adam or SGD"
        )
    return torch.empty_like(new, dtype=value.dtype).copy_(value.expand_as(new)).requires_grad_(False)
