"""Which (sample, expert) pairs at least one of T gates asks for, each once, sorted both ways.

Pairs are numbered by sample; the rows that experts work on are numbered by expert. ``place`` leads from the
one to the other, so that nothing is ever scattered: sums over the pairs of a sample gather.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from comet_moe.kernels.jit import can_run_compiled, jit
from comet_moe.kernels.mix import Places


class Plan(NamedTuple):
    """What a sparse mixture runs.

    Attributes:
        weights: (M, T) weight of each pair in each gate, pairs ordered by sample.
        places: where the pairs stand among the rows, and the first pair of each sample.
        rows: (M,) sample of each row, rows ordered by expert.
        counts: n numbers of rows.
    """

    weights: Tensor
    places: Places
    rows: Tensor
    counts: list[int]


def plan_of_weights(weights: list[Tensor]) -> Plan:
    """The plan of T matrices of weights (B, n)."""
    if can_run_compiled(*weights):
        chosen, place, start, rows, counts = _PlanOfWeights.apply(*weights)
        return Plan(chosen, Places(place, start), rows, counts.tolist())
    return plan_of_weights_torch(weights)


def plan_of_weights_torch(weights: list[Tensor]) -> Plan:
    """The definition."""
    stacked = torch.stack(weights, 1)
    sample, expert = (stacked != 0).any(1).nonzero(as_tuple=True)
    return plan_of_pairs_torch(sample, expert, stacked[sample, :, expert], *stacked.shape[::2])


def plan_of_pairs(sample: Tensor, expert: Tensor, weights: Tensor, samples: int, experts: int) -> Plan:
    """The plan of unique pairs, ordered by sample: (M,), (M,), (M, T)."""
    if can_run_compiled(weights):
        start, counts = torch.empty(samples + 1, dtype=torch.int64), torch.empty(experts, dtype=torch.int64)
        place, rows = torch.empty_like(expert), torch.empty_like(expert)
        known = _sort(
            sample.numpy(),
            expert.numpy(),
            start.numpy(),
            counts.numpy(),
            place.numpy(),
            rows.numpy(),
            np.empty(experts, np.int64),
        )
        if not known:
            raise ValueError(
                f"a routing must name rows 0..{samples - 1} and experts 0..{experts - 1}, got "
                f"{int(sample.min())}..{int(sample.max())} and {int(expert.min())}..{int(expert.max())}"
            )
        return Plan(weights, Places(place, start), rows, counts.tolist())
    return plan_of_pairs_torch(sample, expert, weights, samples, experts)


def plan_of_pairs_torch(sample: Tensor, expert: Tensor, weights: Tensor, samples: int, experts: int) -> Plan:
    """The definition."""
    by_expert = expert.argsort(stable=True)
    place = torch.empty_like(by_expert)
    place[by_expert] = torch.arange(len(place), device=place.device)
    start = torch.zeros(samples + 1, dtype=torch.int64, device=place.device)
    start[1:] = torch.bincount(sample, minlength=samples).cumsum(0)
    counts = torch.bincount(expert, minlength=experts).tolist()
    return Plan(weights, Places(place, start), sample[by_expert], counts)


class _PlanOfWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        samples, experts = weights[0].shape
        stacked = torch.stack(weights)
        start = torch.empty(samples + 1, dtype=torch.int64)
        counts = torch.empty(experts, dtype=torch.int64)
        pairs = _count(stacked.numpy(), start.numpy(), counts.numpy())
        expert, place, rows = (torch.empty(pairs, dtype=torch.int64) for _ in range(3))
        chosen = stacked.new_empty(pairs, len(weights))
        _fill(
            stacked.numpy(),
            counts.numpy(),
            chosen.numpy(),
            expert.numpy(),
            place.numpy(),
            rows.numpy(),
        )
        ctx.save_for_backward(expert, start)
        ctx.shape = stacked.shape
        ctx.mark_non_differentiable(place, start, rows, counts)
        return chosen, place, start, rows, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor, ...]:
        expert, start = ctx.saved_tensors
        out = grad.new_zeros(ctx.shape)
        _scatter(grad.contiguous().numpy(), expert.numpy(), start.numpy(), out.numpy())
        return tuple(out)


@jit
def _count(weights: Any, start: Any, counts: Any) -> int:
    """Pairs in all; ``start`` and ``counts`` are filled."""
    tasks, samples, experts = weights.shape
    counts[:] = 0
    start[0] = 0
    pairs = 0
    for b in range(samples):
        for e in range(experts):
            for t in range(tasks):
                if weights[t, b, e] != 0:
                    counts[e] += 1
                    pairs += 1
                    break
        start[b + 1] = pairs
    return pairs


@jit
def _fill(weights: Any, counts: Any, chosen: Any, expert: Any, place: Any, rows: Any) -> None:
    tasks, samples, experts = weights.shape
    following = np.empty(experts, np.int64)
    total = 0
    for e in range(experts):
        following[e] = total
        total += counts[e]
    pair = 0
    for b in range(samples):
        for e in range(experts):
            active = False
            for t in range(tasks):
                active |= weights[t, b, e] != 0
            if active:
                for t in range(tasks):
                    chosen[pair, t] = weights[t, b, e]
                row = following[e]
                following[e] += 1
                expert[pair], place[pair], rows[row] = e, row, b
                pair += 1


@partial(jit, allocates=False)
def _sort(sample: Any, expert: Any, start: Any, counts: Any, place: Any, rows: Any, following: Any) -> bool:
    """Count the pairs of each sample and expert, then number them by expert; False if one is out of range."""
    counts[:] = 0
    start[:] = 0
    for pair in range(len(sample)):
        if not (0 <= sample[pair] < len(start) - 1 and 0 <= expert[pair] < len(counts)):
            return False
        start[sample[pair] + 1] += 1
        counts[expert[pair]] += 1
    for b in range(len(start) - 1):
        start[b + 1] += start[b]
    total = 0
    for e in range(len(counts)):
        following[e] = total
        total += counts[e]
    for pair in range(len(sample)):
        row = following[expert[pair]]
        following[expert[pair]] = row + 1
        place[pair], rows[row] = row, sample[pair]
    return True


@jit
def _scatter(grad: Any, expert: Any, start: Any, out: Any) -> None:
    """(M, T) back to (T, B, n)."""
    for b in range(out.shape[1]):
        for pair in range(start[b], start[b + 1]):
            for t in range(out.shape[0]):
                out[t, b, expert[pair]] = grad[pair, t]
