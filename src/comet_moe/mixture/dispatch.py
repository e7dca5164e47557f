"""Which (sample, expert) pairs run, and how their outputs are combined.

Shapes: B rows, n experts, T gates (tasks), M pairs that at least one gate selects, u outputs.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from comet_moe import checks
from comet_moe.experts.base import Experts, Slots, WeightedPairs, check_output
from comet_moe.kernels.mix import apply_epilogue, gather_rows, mix, mix_dense, weights_dtype
from comet_moe.kernels.plan import Plan, check_range, plan_from_pairs, plan_from_weights
from comet_moe.mixture.static_dispatch import can_run_static, count_slots, counts_are_known, run_static
from comet_moe.routing import Pairs, Routing

Execution = Literal["auto", "dense", "sparse"]


def check_execution(value: str) -> Execution:
    """``value`` if it is a valid execution mode."""
    if value not in get_args(Execution):
        raise ValueError(f'execution must be "auto", "dense" or "sparse", got {value!r}')
    return cast(Execution, value)


def run_experts(
    experts: Experts, x: Tensor, routings: Sequence[Routing], execution: Execution, sparse_share: float
) -> Tensor:
    """The mixtures of all routings, (B, *input) -> (B, T, *output); the routings record the execution.

    Args:
        experts: the stack.
        x: (B, *input).
        routings: T, over all experts of the stack.
        execution: "dense", "sparse", or "auto", which chooses for this batch.
        sparse_share: "auto" is sparse when at most this share of the B·n pairs is active. In graphs and on
            accelerators the share is an upper bound that holds for any values.
    """
    is_compiling = torch.compiler.is_compiling()
    if checks.in_functorch_transform() and any(checks.is_batched(r.weights) for r in routings):
        if execution == "sparse" or experts.only_pairs:
            raise ValueError(
                "torch.vmap cannot select pairs, whose number depends on values: set execution to "
                '"dense" or "auto"'
                if not experts.only_pairs
                else f"torch.vmap cannot select pairs, and {type(experts).__name__} runs nothing else"
            )
        return _run_all(experts, x, routings)
    if experts.takes_slots and not torch.is_grad_enabled():
        mixed = _run_slots(experts, x, routings, execution, sparse_share)
        if mixed is not None:
            return mixed
    if experts.only_pairs:
        run = torch.compiler.disable(_run_pairs) if is_compiling else _run_pairs
        return run(experts, x, routings)
    if execution == "dense" or (x.is_meta and (experts.takes_pairs or not can_run_static(experts, x))):
        return _run_all(experts, x, routings)
    if experts.takes_pairs and (counts_are_known(x) or fixed_slots(routings) is not None):
        selected = select_pairs(routings, counts_are_known(x))
        count = selected.sample.shape[0]
        if execution == "sparse" or count <= sparse_share * x.shape[0] * experts.num_experts:
            _record_execution(routings, "sparse", count)
            return run_pairs(experts, x, selected)
        return _run_all(experts, x, routings)
    if not counts_are_known(x):
        if can_run_static(experts, x) and x.shape[0] > 0:
            if execution == "auto" and count_slots(routings) > sparse_share * experts.num_experts:
                return _run_all(experts, x, routings)
            mixed, rows = run_static(experts, x, routings)
            _record_execution(routings, "sparse", rows)
            return mixed
        if execution == "auto":
            return _run_all(experts, x, routings)
    if is_compiling:  # the number of pairs is not known to a graph
        mixed, pairs = run_indexed(experts, x, routings)
        _record_execution(routings, "sparse", pairs)
        return mixed
    plan = plan_from_routings(routings, len(x))
    pairs = len(plan.row_sample)
    if execution == "auto" and pairs > sparse_share * len(x) * experts.num_experts:
        return _run_all(experts, x, routings)
    _record_execution(routings, "sparse", pairs)
    return run_sparse(experts, x, plan)


def _run_slots(
    experts: Experts, x: Tensor, routings: Sequence[Routing], execution: Execution, sparse_share: float
) -> Tensor | None:
    """The mixture of one routing in slots, where gradients are off; None where another way is to be taken."""
    slots = routings[0].slots
    if slots is None or len(routings) > 1 or experts.only_pairs or not counts_are_known(x):
        return None
    is_sparse = execution == "sparse" or slots[0].shape[1] <= sparse_share * experts.num_experts
    if execution == "dense" or not is_sparse:
        return None
    mixed = experts(x, Slots(*slots))
    check_output(mixed, (x.shape[0],), f"{type(experts).__name__}.slot_sums", x)
    _record_execution(routings, "sparse", int(slots[1].count_nonzero()))
    return mixed.unsqueeze(1)


def _run_all(experts: Experts, x: Tensor, routings: Sequence[Routing]) -> Tensor:
    _record_execution(routings, "dense", x.shape[0] * experts.num_experts)
    return run_dense(experts, x, routings)


def _run_pairs(experts: Experts, x: Tensor, routings: Sequence[Routing]) -> Tensor:
    plan = plan_from_routings(routings, len(x))
    _record_execution(routings, "sparse", len(plan.row_sample))
    return run_sparse(experts, x, plan)


def _record_execution(routings: Sequence[Routing], execution: str, expert_rows: int | Tensor) -> None:
    for routing in routings:
        routing.execution, routing.expert_rows = execution, expert_rows


def plan_from_routings(routings: Sequence[Routing], rows: int) -> Plan:
    """Every pair that at least one of the routings selects, once."""
    if not all(routing.in_pairs for routing in routings):
        return plan_from_weights([routing.weights.flatten(0, -2) for routing in routings])
    return plan_from_pairs(*select_pairs(routings), rows, routings[0].num_experts)


def fixed_slots(routings: Sequence[Routing]) -> tuple[Tensor, Tensor] | None:
    """Experts and weights (B, c) of a single routing in slots, else None."""
    return routings[0].slots if len(routings) == 1 else None


def select_pairs(routings: Sequence[Routing], values_are_known: bool = True) -> WeightedPairs:
    """Every pair that at least one of the routings selects; nothing has the size n if all are in pairs.

    Where values are not known, the pairs are all slots of :func:`fixed_slots`, unused ones with weight 0.
    """
    slots = fixed_slots(routings)
    if slots is not None and not values_are_known:
        expert, weight = slots
        sample = torch.arange(expert.shape[0], device=expert.device).repeat_interleave(expert.shape[1])
        return WeightedPairs(sample, expert.flatten(), weight.reshape(-1, 1))
    if len(routings) == 1:
        sample, expert, weight = routings[0].pairs()
        return WeightedPairs(sample, expert, weight.unsqueeze(-1))
    rows = prod(routings[0].batch_shape)
    return WeightedPairs(*_union([routing.pairs() for routing in routings], rows, routings[0].num_experts))


def run_pairs(experts: Experts, x: Tensor, pairs: WeightedPairs) -> Tensor:
    """The mixtures by a stack that takes pairs: (B, *input) -> (B, T, *output)."""
    mixed = experts(x, pairs)
    source = f"{type(experts).__name__}.weighted_sums"
    check_output(mixed, (x.shape[0], pairs.weights.shape[1]), source, x)
    return mixed


def _union(pairs: Sequence[Pairs], rows: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of several routings, each once, ordered by sample, without ever forming (B, n)."""
    sample, expert, weight = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    check_range(sample, expert, rows, experts)  # otherwise expert n of one row would be expert 0 of the next
    unique, pair = (sample * experts + expert).unique(return_inverse=True)
    lengths = torch.tensor([len(of_gate.weight) for of_gate in pairs], device=sample.device)
    task = torch.repeat_interleave(torch.arange(len(pairs), device=sample.device), lengths)
    weights = weight.new_zeros(len(unique), len(pairs)).index_put((pair, task), weight)
    return unique // experts, unique % experts, weights


def run_dense(experts: Experts, x: Tensor, routings: Sequence[Routing]) -> Tensor:
    """Every expert on every row, then the weighted sums: (B, *input) -> (B, T, *output)."""
    weights = torch.stack([routing.weights.flatten(0, -2) for routing in routings], 1)
    outputs = experts(x)
    check_output(outputs, (x.shape[0], experts.num_experts), f"{type(experts).__name__}.dense", x)
    flat = outputs.flatten(2)
    mixed = mix_dense(flat, weights.to(weights_dtype(flat.dtype)), experts.epilogue)
    return mixed.unflatten(-1, outputs.shape[2:])


def run_indexed(experts: Experts, x: Tensor, routings: Sequence[Routing]) -> tuple[Tensor, int]:
    """Like :func:`run_sparse`, in a form that can be traced: for each expert, the indices of its rows.

    Returns:
        (B, *input) -> (B, T, *output), and the number of pairs that ran, which is symbolic in a graph.
    """
    weights = torch.stack([routing.weights.flatten(0, -2) for routing in routings], 1)
    mixed, pairs = None, 0
    for expert in range(experts.num_experts):
        own = weights[:, :, expert]
        index = (own != 0).any(1).nonzero().squeeze(1)
        rows = x[index]
        outputs = experts.one(rows, expert)
        check_output(outputs, (rows.shape[0],), f"{type(experts).__name__}.one", rows)
        outputs = apply_epilogue(outputs, experts.epilogue)
        weighted = own[index].to(outputs.dtype).unsqueeze(-1) * outputs.flatten(1).unsqueeze(1)
        if mixed is None:
            shape = outputs.shape[1:]
            mixed = weighted.new_zeros(x.shape[0], *weighted.shape[1:])
        mixed = mixed.index_add(0, index, weighted)
        pairs += rows.shape[0]
    assert mixed is not None
    return mixed.unflatten(-1, shape), pairs


def run_sparse(experts: Experts, x: Tensor, plan: Plan) -> Tensor:
    """Every pair of the plan once, then the weighted sums: (B, *input) -> (B, T, *output)."""
    rows = gather_rows(x.flatten(1), plan.row_sample, plan.layout).unflatten(1, x.shape[1:])
    outputs = experts(rows, plan.counts)
    check_output(outputs, (rows.shape[0],), f"{type(experts).__name__}.sparse", rows)
    flat = outputs.flatten(1)
    mixed = mix(flat, plan.weights.to(weights_dtype(flat.dtype)), plan.layout, experts.epilogue)
    return mixed.unflatten(-1, outputs.shape[1:])
