"""Inference of a COMET gate: each sample walks down each tree, and only the nodes it meets are evaluated.

At a node inside (-γ/2, γ/2) both sides are followed, so the answer is that of the dense gate. The cost is
O(k p log n) a sample where paths are hard; nothing of size (B, n) is formed.

The descent as a torch operator, for compiled and exported graphs and under dispatch modes.

It gives the weights (B, n): a graph has no room for what soft paths may need. Nodes are still evaluated only
where a sample comes by.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from comet_moe.kernels.threads import WORTH_A_THREAD, over_rows
from comet_moe.kernels.walk import scratch, walk

ROOM = 8
"""Experts a tree that a sample has room for at first; a sample with more of them is walked a second time."""


class Nodes(NamedTuple):
    """The parameters of the trees where they are in memory.

    Attributes:
        addresses: of split_weight (k, n-1, p), split_bias (k, n-1), leaf_weight (k, n, p), leaf_bias (k, n).
        shape: (k, n, p).
        dtype: of all of them.
        tensors: those that are there, so that they stay.
    """

    addresses: tuple[int, ...]
    shape: tuple[int, int, int]
    dtype: Any
    tensors: Sequence[Tensor]


def nodes_of(tensors: Sequence[Tensor], dtype: torch.dtype) -> Nodes:
    """The nodes in ``tensors``, or in copies where they are not contiguous or of another type."""
    tensors = [tensor.detach().to(dtype).contiguous() for tensor in tensors]
    k, n, p = tensors[2].shape
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    return Nodes(addresses, (k, n, p), tensors[3].numpy().dtype, tensors)


class Reached(NamedTuple):
    """The experts that samples reach, in ``room`` places each; unused places have weight 0.

    Attributes:
        expert: (B, room) int64; in a row with more experts than room the first is minus their number.
        weight: (B, room).
        most: experts of the sample that has most.
        visited: nodes and leaves that were evaluated.
        finite: whether all their logits are; if not, the rest means nothing.
    """

    expert: Any
    weight: Any
    most: int
    visited: int
    finite: bool


def descend(x: Tensor, nodes: Nodes, gamma: float) -> Reached:
    """Walk ``x`` (B, p), contiguous, on the CPU and of the nodes' type, down the trees."""
    rows = x.shape[0]
    addresses, (k, n, p), dtype, _ = nodes
    room = k * min(ROOM, n)
    expert, weight = np.zeros((rows, room), np.int64), np.zeros((rows, room), dtype)
    given: Any = (rows, x.data_ptr(), *addresses, k, n, p, gamma, expert, weight, 0, 0)
    work = rows * k * n.bit_length() * p
    if work < WORTH_A_THREAD:  # over_rows would do the same, a microsecond later
        return Reached(expert, weight, *walk(0, rows, *given, *scratch(k, n, dtype)))
    found = over_rows(lambda first, last: walk(first, last, *given, *scratch(k, n, dtype)), rows, work)
    most, visited, finite = zip(*found, strict=True)
    return Reached(expert, weight, max(most), sum(visited), all(finite))


def descend_again(x: Tensor, nodes: Nodes, gamma: float, reached: Reached) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs (sample, expert, weight), ordered by sample, where some samples had too little room."""
    expert, weight = reached[:2]
    fits = expert[:, 0] >= 0
    used = fits[:, None] & (weight != 0)
    count = np.where(fits, used.sum(1), -expert[:, 0])
    start = np.concatenate(([0], count.cumsum()))
    sample = np.repeat(np.arange(len(count)), count)
    all_expert, all_weight = np.empty((1, len(sample)), np.int64), np.empty((1, len(sample)), nodes.dtype)
    all_expert[0, fits[sample]], all_weight[0, fits[sample]] = expert[used], weight[used]
    chosen = np.flatnonzero(~fits)
    places = (all_expert, all_weight, start.ctypes.data, chosen.ctypes.data)
    given: Any = (len(count), x.data_ptr(), *nodes.addresses, *nodes.shape, gamma, *places)
    k, n, p = nodes.shape
    over_rows(
        lambda first, last: walk(first, last, *given, *scratch(k, n, nodes.dtype)),
        len(chosen),
        int(count[chosen].sum()) * p,
    )
    return torch.from_numpy(sample), torch.from_numpy(all_expert[0]), torch.from_numpy(all_weight[0])


@torch.library.custom_op("comet_moe::descend", mutates_args=())
def descend_op(
    x: Tensor,
    split_weight: Tensor,
    split_bias: Tensor,
    leaf_weight: Tensor,
    leaf_bias: Tensor,
    gamma: float,
) -> Tensor:
    """(B, p) and the gate's parameters -> weights (B, n)."""
    nodes = nodes_of((split_weight, split_bias, leaf_weight, leaf_bias), x.dtype)
    x = x.contiguous()
    return weights_of(x, nodes, gamma, descend(x, nodes, gamma))


@descend_op.register_fake
def _(
    x: Tensor,
    split_weight: Tensor,
    split_bias: Tensor,
    leaf_weight: Tensor,
    leaf_bias: Tensor,
    gamma: float,
) -> Tensor:
    return x.new_empty(x.shape[0], leaf_bias.shape[1])


@register_flop_formula(torch.ops.comet_moe.descend, get_raw=True)
def _flops(x: Tensor, *parameters: Any, out_val: Tensor, **_: object) -> int:
    """Two for each feature of each node and leaf that was visited."""
    *tensors, gamma = parameters
    return 2 * x.shape[1] * descend(x.contiguous(), nodes_of(tensors, x.dtype), gamma).visited


def weights_of(x: Tensor, nodes: Nodes, gamma: float, reached: Reached) -> Tensor:
    """What was reached as weights (B, n); NaN where a logit is not finite."""
    weights = x.new_zeros(len(x), nodes.shape[1])
    if not reached.finite:
        return weights.fill_(float("nan"))
    if reached.most > reached.expert.shape[1]:
        sample, expert, weight = descend_again(x, nodes, gamma, reached)
        return weights.index_put_((sample, expert), weight)
    return weights.scatter_add_(1, torch.from_numpy(reached.expert), torch.from_numpy(reached.weight))
