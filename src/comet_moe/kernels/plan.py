"""Which (sample, expert) pairs at least one of T gates asks for, each once, sorted in two ways.

Pairs are ordered by sample; the rows that experts work on are ordered by expert. ``pair_row`` maps a pair to
its row, so that the sum over the pairs of a sample gathers rows, and nothing is ever scattered.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from comet_moe.kernels.jit import can_run_compiled, jit
from comet_moe.kernels.mix import PairLayout


class Plan(NamedTuple):
    """The (sample, expert) pairs that a sparse mixture runs.

    Attributes:
        weights: (M, T) weight of each pair in each gate, pairs ordered by sample.
        layout: the row of each pair, and the first pair of each sample.
        row_sample: (M,) sample of each row, rows ordered by expert.
        counts: number of rows of each of the n experts.
    """

    weights: Tensor
    layout: PairLayout
    row_sample: Tensor
    counts: list[int]


def plan_from_weights(weights: list[Tensor]) -> Plan:
    """The plan of T matrices of weights (B, n)."""
    if can_run_compiled(*weights):
        chosen, pair_row, start, row_sample, counts = _PlanFromWeights.apply(*weights)
        return Plan(chosen, PairLayout(pair_row, start), row_sample, counts.tolist())
    return plan_from_weights_torch(weights)


def plan_from_weights_torch(weights: list[Tensor]) -> Plan:
    """The definition, by torch operators; the compiled version must agree with it."""
    stacked = torch.stack(weights, 1)
    sample, expert = (stacked != 0).any(1).nonzero(as_tuple=True)
    return _sort_torch(sample, expert, stacked[sample, :, expert], *stacked.shape[::2])


def plan_from_pairs(sample: Tensor, expert: Tensor, weights: Tensor, samples: int, experts: int) -> Plan:
    """The plan of unique pairs, ordered by sample: (M,) int64, (M,) int64, (M, T)."""
    if not can_run_compiled(weights):
        return plan_from_pairs_torch(sample, expert, weights, samples, experts)
    _check_tensors(sample, expert, weights)
    start, counts = torch.empty(samples + 1, dtype=torch.int64), torch.empty(experts, dtype=torch.int64)
    pair_row, row_sample = torch.empty_like(expert), torch.empty_like(expert)
    valid = _sort(
        sample.numpy(),
        expert.numpy(),
        start.numpy(),
        counts.numpy(),
        pair_row.numpy(),
        row_sample.numpy(),
        np.empty(experts, np.int64),
    )
    if not valid:
        check_range(sample, expert, samples, experts)
        _check_order(sample)
    return Plan(weights, PairLayout(pair_row, start), row_sample, counts.tolist())


def plan_from_pairs_torch(
    sample: Tensor, expert: Tensor, weights: Tensor, samples: int, experts: int
) -> Plan:
    """The definition. Its checks read values, but so does the plan: its counts are numbers of the host."""
    _check_tensors(sample, expert, weights)
    check_range(sample, expert, samples, experts)
    _check_order(sample)
    return _sort_torch(sample, expert, weights, samples, experts)


def _check_tensors(sample: Tensor, expert: Tensor, weights: Tensor) -> None:
    if sample.dim() != 1 or weights.dim() != 2 or not (sample.shape == expert.shape == weights.shape[:1]):
        raise ValueError(
            f"a routing must have one expert and one row of weights for each of its {len(sample)} samples, "
            f"got shapes {tuple(expert.shape)} and {tuple(weights.shape)}"
        )
    if sample.dtype != torch.int64 or expert.dtype != torch.int64:
        raise ValueError(
            f"the samples and experts of a routing must be torch.int64, got {sample.dtype} and {expert.dtype}"
        )
    if not (sample.device == expert.device == weights.device):
        raise ValueError(
            "the samples, experts and weights of a routing must be on one device, got "
            f"{sample.device}, {expert.device} and {weights.device}"
        )


def check_range(sample: Tensor, expert: Tensor, samples: int, experts: int) -> None:
    """Every sample must be in 0..samples-1 and every expert in 0..experts-1."""
    if not len(sample):
        return
    bounds = torch.stack((*torch.aminmax(sample), *torch.aminmax(expert))).tolist()
    for name, (low, high), limit in (("rows", bounds[:2], samples), ("experts", bounds[2:], experts)):
        if low < 0 or high >= limit:
            raise ValueError(f"a routing must name {name} 0..{limit - 1}, got {low}..{high}")


def _check_order(sample: Tensor) -> None:
    if bool((sample[1:] < sample[:-1]).any()):
        raise ValueError("the pairs of a routing must be ordered by sample: sort them by pairs.sample")


def _sort_torch(sample: Tensor, expert: Tensor, weights: Tensor, samples: int, experts: int) -> Plan:
    by_expert = expert.argsort(stable=True)
    pair_row = torch.empty_like(by_expert)
    pair_row[by_expert] = torch.arange(len(pair_row), device=pair_row.device)
    start = torch.zeros(samples + 1, dtype=torch.int64, device=pair_row.device)
    start[1:] = torch.bincount(sample, minlength=samples).cumsum(0)
    counts = torch.bincount(expert, minlength=experts).tolist()
    return Plan(weights, PairLayout(pair_row, start), sample[by_expert], counts)


class _PlanFromWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        samples, experts = weights[0].shape
        stacked = torch.stack(weights)
        start = torch.empty(samples + 1, dtype=torch.int64)
        counts = torch.empty(experts, dtype=torch.int64)
        pairs = _count(stacked.numpy(), start.numpy(), counts.numpy())
        expert, pair_row, row_sample = (torch.empty(pairs, dtype=torch.int64) for _ in range(3))
        chosen = stacked.new_empty(pairs, len(weights))
        _fill(
            stacked.numpy(),
            counts.numpy(),
            chosen.numpy(),
            expert.numpy(),
            pair_row.numpy(),
            row_sample.numpy(),
        )
        ctx.save_for_backward(expert, start)
        ctx.shape = stacked.shape
        ctx.mark_non_differentiable(pair_row, start, row_sample, counts)
        return chosen, pair_row, start, row_sample, counts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor, ...]:
        expert, start = ctx.saved_tensors
        out = grad.new_zeros(ctx.shape)
        if torch.is_grad_enabled():  # for second derivatives: the same by operators that have one
            sample = torch.repeat_interleave(torch.arange(len(start) - 1), start.diff())
            task = torch.arange(len(out)).unsqueeze(1)
            return tuple(out.index_put((task, sample, expert), grad.t()))
        _scatter(grad.contiguous().numpy(), expert.numpy(), start.numpy(), out.numpy())
        return tuple(out)


@jit
def _count(weights: Any, start: Any, counts: Any) -> int:
    """The number of pairs; fills ``start`` and ``counts``."""
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
def _fill(weights: Any, counts: Any, chosen: Any, expert: Any, pair_row: Any, row_sample: Any) -> None:
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
                expert[pair], pair_row[pair], row_sample[row] = e, row, b
                pair += 1


@partial(jit, allocates=False)
def _sort(
    sample: Any, expert: Any, start: Any, counts: Any, pair_row: Any, row_sample: Any, following: Any
) -> bool:
    """Count the pairs of each sample and expert, then number them by expert.

    False if an index is out of range or the samples are not in order.
    """
    counts[:] = 0
    start[:] = 0
    for pair in range(len(sample)):
        if not (0 <= sample[pair] < len(start) - 1 and 0 <= expert[pair] < len(counts)):
            return False
        if pair > 0 and sample[pair] < sample[pair - 1]:
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
        pair_row[pair], row_sample[row] = row, sample[pair]
    return True


@jit
def _scatter(grad: Any, expert: Any, start: Any, out: Any) -> None:
    """(M, T) back to (T, B, n)."""
    for b in range(out.shape[1]):
        for pair in range(start[b], start[b + 1]):
            for t in range(out.shape[0]):
                out[t, b, expert[pair]] = grad[pair, t]
