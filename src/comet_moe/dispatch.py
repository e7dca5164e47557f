"""Which (sample, expert) pairs run, and how their outputs are combined.

Shapes: B rows, n experts, T gates (tasks), M pairs that at least one gate asks for, u outputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from comet_moe.experts.base import Experts, check_output
from comet_moe.kernels.mix import apply_epilogue, gather_rows, mix, mix_dense
from comet_moe.kernels.plan import Plan, plan_from_pairs, plan_from_weights
from comet_moe.routing import Routing


def plan_from_routings(routings: Sequence[Routing], rows: int) -> Plan:
    """Every pair that at least one of the routings asks for, once."""
    if not all(routing.in_pairs for routing in routings):
        return plan_from_weights([routing.weights.flatten(0, -2) for routing in routings])
    experts = routings[0].num_experts
    if len(routings) == 1:
        sample, expert, weight = routings[0].pairs()
        return plan_from_pairs(sample, expert, weight.unsqueeze(-1), rows, experts)
    sample, expert, weights = _union([routing.pairs() for routing in routings], experts)
    return plan_from_pairs(sample, expert, weights, rows, experts)


def _union(pairs: Sequence[tuple[Tensor, Tensor, Tensor]], experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of several routings, each once, ordered by sample, without ever forming (B, n)."""
    keys = torch.cat([sample * experts + expert for sample, expert, _ in pairs])
    unique, pair = keys.unique(return_inverse=True)
    lengths = torch.tensor([len(weight) for _, _, weight in pairs], device=keys.device)
    task = torch.repeat_interleave(torch.arange(len(pairs), device=keys.device), lengths)
    weights = pairs[0][2].new_zeros(len(unique), len(pairs))
    weights = weights.index_put((pair, task), torch.cat([weight for _, _, weight in pairs]))
    return unique // experts, unique % experts, weights


def run_dense(experts: Experts, x: Tensor, routings: Sequence[Routing]) -> Tensor:
    """Every expert on every row, then the weighted sums: (B, *input) -> (B, T, *output)."""
    weights = torch.stack([routing.weights.flatten(0, -2) for routing in routings], 1)
    outputs = experts.dense(x)
    check_output(outputs, (x.shape[0], experts.num_experts), f"{type(experts).__name__}.dense", x)
    flat = outputs.flatten(2)
    mixed = mix_dense(flat, weights.to(flat.dtype), experts.epilogue)
    return mixed.unflatten(-1, outputs.shape[2:])


def run_indexed(experts: Experts, x: Tensor, routings: Sequence[Routing]) -> Tensor:
    """As :func:`run_sparse`, in a form that a graph can hold: for each expert, the indices of its rows."""
    weights = torch.stack([routing.weights.flatten(0, -2) for routing in routings], 1)
    mixed = None
    for expert in range(experts.num_experts):
        own = weights[:, :, expert]
        rows = (own != 0).any(1).nonzero().squeeze(1)
        outputs = apply_epilogue(experts.one(x[rows], expert), experts.epilogue)
        weighted = own[rows].to(outputs.dtype).unsqueeze(-1) * outputs.flatten(1).unsqueeze(1)
        if mixed is None:
            shape = outputs.shape[1:]
            mixed = weighted.new_zeros(x.shape[0], *weighted.shape[1:])
        mixed = mixed.index_add(0, rows, weighted)
    assert mixed is not None
    return mixed.unflatten(-1, shape)


def run_sparse(experts: Experts, x: Tensor, plan: Plan) -> Tensor:
    """Every pair of the plan once, then the weighted sums: (B, *input) -> (B, T, *output)."""
    rows = gather_rows(x.flatten(1), plan.row_sample, plan.layout).unflatten(1, x.shape[1:])
    outputs = experts.sparse(rows, plan.counts)
    check_output(outputs, (rows.shape[0],), f"{type(experts).__name__}.sparse", rows)
    flat = outputs.flatten(1)
    mixed = mix(flat, plan.weights.to(flat.dtype), plan.layout, experts.epilogue)
    return mixed.unflatten(-1, outputs.shape[1:])
