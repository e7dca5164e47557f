"""Which (sample, expert) pairs at least one of T gates asks for, each once, sorted in two ways.

Pairs are ordered by sample; the rows that experts work on are ordered by expert. ``pair_row`` maps a pair to
its row, so that the sum over the pairs of a sample gathers rows, and nothing is ever scattered.
"""

from typing import NamedTuple

import torch
from torch import Tensor

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
    stacked = torch.stack(weights, 1)
    sample, expert = (stacked != 0).any(1).nonzero(as_tuple=True)
    return _sort(sample, expert, stacked[sample, :, expert], *stacked.shape[::2])


def plan_from_pairs(sample: Tensor, expert: Tensor, weights: Tensor, samples: int, experts: int) -> Plan:
    """The plan of unique pairs, ordered by sample: (M,) int64, (M,) int64, (M, T).

    Its checks read values, but so does the plan: its counts are numbers of the host.
    """
    check_pairs(sample, expert, weights, samples, experts)
    return _sort(sample, expert, weights, samples, experts)


def check_pairs(sample: Tensor, expert: Tensor, weights: Tensor, samples: int, experts: int) -> None:
    """Compiled loops trust pairs: (M,) int64, (M,) int64, (M, T), in range and ordered by sample."""
    _check_tensors(sample, expert, weights)
    check_range(sample, expert, samples, experts)
    if bool((sample[1:] < sample[:-1]).any()):
        raise ValueError("the pairs of a routing must be ordered by sample: sort them by pairs.sample")


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


def _sort(sample: Tensor, expert: Tensor, weights: Tensor, samples: int, experts: int) -> Plan:
    by_expert = expert.argsort(stable=True)
    pair_row = torch.empty_like(by_expert)
    pair_row[by_expert] = torch.arange(len(pair_row), device=pair_row.device)
    counts = torch.bincount(expert, minlength=experts).tolist()
    return Plan(weights, PairLayout(pair_row, first_pairs(sample, samples)), sample[by_expert], counts)


def first_pairs(sample: Tensor, samples: int) -> Tensor:
    """The first pair of each sample, and the number of pairs at the end: (M,) -> (B + 1,)."""
    start = torch.zeros(samples + 1, dtype=torch.int64, device=sample.device)
    start[1:] = torch.bincount(sample, minlength=samples).cumsum(0)
    return start
