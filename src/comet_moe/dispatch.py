"""Which (sample, expert) pairs run, and how their outputs are combined.

Shapes: B rows, n experts, T gates (tasks), M pairs that at least one gate asks for, u outputs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from comet_moe.experts.base import Experts
from comet_moe.routing import Routing


class Plan(NamedTuple):
    """Every pair that at least one gate asks for, once, ordered by sample.

    Attributes:
        sample: (M,) rows.
        expert: (M,) experts.
        weights: (M, T) weight of the pair in each gate.
    """

    sample: Tensor
    expert: Tensor
    weights: Tensor


def plan_pairs(routings: Sequence[Routing]) -> Plan:
    """The union of the pairs of several routings over the same rows and experts."""
    if len(routings) == 1:
        sample, expert, weight = routings[0].pairs()
        return Plan(sample, expert, weight.unsqueeze(-1))
    if all(routing.in_pairs for routing in routings):
        return _merge([routing.pairs() for routing in routings], routings[0].num_experts)
    weights = stacked_weights(routings)
    sample, expert = (weights != 0).any(1).nonzero(as_tuple=True)
    return Plan(sample, expert, weights[sample, :, expert])


def _merge(pairs: Sequence[tuple[Tensor, Tensor, Tensor]], num_experts: int) -> Plan:
    """The union without ever forming (B, n)."""
    keys = torch.cat([sample * num_experts + expert for sample, expert, _ in pairs])
    unique, place = keys.unique(return_inverse=True)
    first = pairs[0][2]
    weights = first.new_zeros(len(unique), len(pairs))
    task = torch.repeat_interleave(
        torch.arange(len(pairs), device=keys.device),
        torch.tensor([len(weight) for _, _, weight in pairs], device=keys.device),
    )
    weights = weights.index_put((place, task), torch.cat([weight for _, _, weight in pairs]))
    return Plan(unique // num_experts, unique % num_experts, weights)


def stacked_weights(routings: Sequence[Routing]) -> Tensor:
    """(B, T, n)."""
    return torch.stack([routing.weights.flatten(0, -2) for routing in routings], 1)


def run_dense(experts: Experts, x: Tensor, weights: Tensor) -> Tensor:
    """Every expert on every row, then the weighted sums: (B, *input), (B, T, n) -> (B, T, *output)."""
    outputs = experts.dense(x)
    flat = outputs.flatten(2)
    mixed = torch.bmm(weights.to(flat.dtype), flat)
    return mixed.unflatten(-1, outputs.shape[2:]) if outputs.dim() > 2 else mixed


def run_sparse(experts: Experts, x: Tensor, plan: Plan) -> Tensor:
    """Every pair of the plan once, then the weighted sums: (B, *input) -> (B, T, *output)."""
    by_expert = plan.expert.argsort(stable=True)
    sample = plan.sample[by_expert]
    counts = torch.bincount(plan.expert, minlength=experts.num_experts).tolist()
    outputs = experts.sparse(x, sample, counts)
    flat = outputs.flatten(1)
    weights = plan.weights[by_expert].to(flat.dtype)
    weighted = weights.unsqueeze(-1) * flat.unsqueeze(1)
    mixed = weighted.new_zeros(len(x), *weighted.shape[1:]).index_add(0, sample, weighted)
    return mixed.unflatten(-1, outputs.shape[1:])
