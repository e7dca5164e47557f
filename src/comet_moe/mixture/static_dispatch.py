"""Sparse execution without host synchronisation: static shapes, and counts that stay on the device.

It is for accelerators and graphs, where the host would wait for each count.

Shapes: B rows, n experts, T gates, u outputs, c slots per row. c is the largest number of experts that all
gates together can select for a row.

Each row has c slots, the selected experts first. The B·c slots are sorted by expert, unused slots last. Each
expert then has consecutive rows, whose ends are the offsets of ``F.grouped_mm``. Rows of unused slots are not
multiplied, and their outputs are zeros. The inverse permutation brings the outputs back to their rows, where
they are summed. All of these are gathers, so the result is deterministic.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from comet_moe.checks import PLAIN_TENSOR_TYPES, no_autocast
from comet_moe.experts.base import Experts, check_output
from comet_moe.kernels.jit import is_portable
from comet_moe.kernels.mix import apply_epilogue, weights_dtype
from comet_moe.routing import Routing

STATIC_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that ``F.grouped_mm`` takes."""


class StaticPlan(NamedTuple):
    """Slots sorted by expert.

    Attributes:
        order: (B·c,) slot of each sorted row.
        place: (B·c,) sorted row of each slot, the inverse of ``order``.
        offsets: (n,) int32, where the rows of each expert end.
        weights: (B, T, c) weight of each slot in each gate, 0 if it is unused.
    """

    order: Tensor
    place: Tensor
    offsets: Tensor
    weights: Tensor


def counts_are_known(x: Tensor) -> bool:
    """Whether Python code can read values of ``x`` without waiting: eager mode, on the CPU."""
    return x.is_cpu and type(x) in PLAIN_TENSOR_TYPES and not torch.compiler.is_compiling()


def can_run_static(experts: Experts, x: Tensor) -> bool:
    """Whether ``experts`` can run with counts that stay on the device, in a graph of torch operators."""
    return experts.takes_offsets and x.dtype in STATIC_TYPES and not is_portable()


def count_slots(routings: Sequence[Routing]) -> int:
    """c: upper bound on the experts that all ``routings`` together select for a row, for any values."""
    n = routings[0].num_experts
    bounds = [n if routing.most_experts is None else routing.most_experts for routing in routings]
    return min(n, sum(bounds))


def make_plan(weights: Tensor, slots: int) -> StaticPlan:
    """The plan of weights (B, T, n), in which at most ``slots`` experts per row have a nonzero weight."""
    rows, tasks, n = weights.shape
    active = (weights != 0).any(1)
    if slots == n:
        expert = torch.arange(n, device=weights.device).expand(rows, n)
        is_used = active
    else:
        used, expert = active.to(torch.int32).topk(slots, -1)
        is_used = used != 0
    chosen = weights.gather(2, expert.unsqueeze(1).expand(rows, tasks, slots))
    keys = torch.where(is_used, expert, n).flatten()
    order = keys.argsort(stable=True)
    place = torch.empty_like(order).scatter(0, order, torch.arange(rows * slots, device=order.device))
    offsets = active.sum(0).cumsum(0).to(torch.int32)
    return StaticPlan(order, place, offsets, chosen)


def run_static(experts: Experts, x: Tensor, routings: Sequence[Routing]) -> tuple[Tensor, Tensor]:
    """The selected pairs only.

    Returns:
        (B, *input) -> (B, T, *output), and the number of pairs, a scalar on the device.
    """
    slots = count_slots(routings)
    weights = torch.stack([routing.weights.flatten(0, -2) for routing in routings], 1)
    plan = make_plan(weights, slots)
    rows = x.unsqueeze(1).expand(x.shape[0], slots, *x.shape[1:]).flatten(0, 1)[plan.order]
    outputs = experts(rows, plan.offsets)
    check_output(outputs, (rows.shape[0],), f"{type(experts).__name__}.sorted_rows", rows)
    flat = apply_epilogue(outputs, experts.epilogue).flatten(1)[plan.place]
    by_row = flat.unflatten(0, (x.shape[0], slots))  # (B, c, u)
    with no_autocast(x):
        dtype = weights_dtype(flat.dtype)
        mixed = torch.bmm(plan.weights.to(dtype), by_row.to(dtype)).to(flat.dtype)
    return mixed.unflatten(-1, outputs.shape[1:]), plan.offsets[-1]
