"""Inference of a COMET gate: each sample walks down each tree, and only the nodes it meets are evaluated.

At a node inside (-γ/2, γ/2) both sides are followed, so the weights are those of the dense gate. The cost is
O(k p log n) per sample where paths are hard; no tensor of size (B, n) is formed.

For graphs and under dispatch modes the descent is also a torch operator, :func:`descend_op`. It returns
weights (B, n), because the size of anything smaller would depend on the values.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from comet_moe.kernels.autograd import as_array, parameter_as_array
from comet_moe.kernels.jit import is_plain_cpu
from comet_moe.kernels.soft_trees import soft_trees
from comet_moe.kernels.threads import count_threads, over_rows
from comet_moe.kernels.walk import walk, walk_in_team

SLOTS_PER_TREE = 8
"""Slots per tree that a sample has at first; one that reaches more experts is walked a second time."""

_NO_INDICES = np.empty(0, np.int64)


class Trees(NamedTuple):
    """Parameters of k trees as contiguous arrays of one type.

    Attributes:
        split_weight, split_bias: (k, n-1, p), (k, n-1).
        leaf_weight, leaf_bias: (k, n, p), (k, n).
    """

    split_weight: Any
    split_bias: Any
    leaf_weight: Any
    leaf_bias: Any


def read_trees(parameters: Sequence[Tensor], dtype: torch.dtype) -> Trees:
    """The parameters of a COMET gate in the order of :class:`Trees`, as views of memory where possible."""
    arrays = [parameter_as_array(t if t.dtype is dtype else t.to(dtype)) for t in parameters]
    trees = split_weight, split_bias, leaf_weight, leaf_bias = Trees(*arrays)
    k, n, p = leaf_weight.shape if leaf_weight.ndim == 3 else (0, 0, 0)
    if (
        k < 1
        or n < 1
        or split_weight.shape != (k, n - 1, p)
        or split_bias.shape != (k, n - 1)
        or leaf_bias.shape != (k, n)
    ):
        raise ValueError(
            "split_weight, split_bias, leaf_weight and leaf_bias must have shapes (k, n-1, p), (k, n-1), "
            f"(k, n, p) and (k, n), got {', '.join(str(array.shape) for array in trees)}"
        )
    return trees


class Descent(NamedTuple):
    """The experts that samples reach, in a number of slots per sample; unused slots have weight 0.

    Attributes:
        expert: (B, slots) int64; for a sample that reaches more experts, the first is minus their number.
        weight: (B, slots).
        most_experts: the most experts that one sample reaches.
        visited: number of nodes and leaves that were evaluated.
        finite: whether all their logits are finite; if not, the weights are undefined.
    """

    expert: Any
    weight: Any
    most_experts: int
    visited: int
    finite: bool

    @property
    def fits(self) -> bool:
        """Whether every sample has slots for all its experts."""
        return self.most_experts <= self.expert.shape[1]


def descend(x: Tensor, trees: Trees, gamma: float) -> Descent:
    """Walk ``x`` (B, p), on the CPU and of the type of the trees, down the trees."""
    k, n, p = trees.leaf_weight.shape
    rows = _read_rows(x, trees)
    shape = len(rows), k * min(SLOTS_PER_TREE, n)
    expert, weight = np.zeros(shape, np.int64), np.zeros(shape, rows.dtype)
    outputs = (expert, weight, _NO_INDICES, _NO_INDICES)
    most_experts, visited, finite = _walk_rows(
        len(rows), len(rows) * k * n.bit_length() * p, rows, *trees, gamma, *outputs
    )
    return Descent(expert, weight, most_experts, visited, finite)


def descend_again(x: Tensor, trees: Trees, gamma: float, first: Descent) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs (sample, expert, weight), ordered by sample, after a descent without enough slots."""
    p = trees.leaf_weight.shape[2]
    rows = _read_rows(x, trees)
    fits = first.expert[:, 0] >= 0
    used = fits[:, None] & (first.weight != 0)
    count = np.where(fits, used.sum(1), -first.expert[:, 0])
    offsets = np.concatenate(([0], count.cumsum()))
    sample = np.repeat(np.arange(len(count)), count)
    expert, weight = np.empty((1, len(sample)), np.int64), np.empty((1, len(sample)), rows.dtype)
    expert[0, fits[sample]], weight[0, fits[sample]] = first.expert[used], first.weight[used]
    chosen = np.flatnonzero(~fits)
    work = int(count[chosen].sum()) * p
    _walk_rows(len(chosen), work, rows, *trees, gamma, expert, weight, offsets, chosen)
    return torch.from_numpy(sample), torch.from_numpy(expert[0]), torch.from_numpy(weight[0])


def _walk_rows(rows: int, work: int, *arguments: Any) -> tuple[int, int, bool]:
    """:func:`walk` in threads: the most experts of a row, nodes visited, whether all logits are finite."""
    summary = np.empty((count_threads(rows, work), 3), np.int64)
    if over_rows(walk, walk_in_team, rows, work, *arguments, summary) == 1:
        most_experts, visited, finite = summary[0].tolist()
        return most_experts, visited, bool(finite)
    return int(summary[:, 0].max()), int(summary[:, 1].sum()), bool(summary[:, 2].all())


def _read_rows(x: Tensor, trees: Trees) -> Any:
    """``x`` as an array (B, p)."""
    rows, p, dtype = as_array(x), trees.leaf_weight.shape[2], trees.leaf_weight.dtype
    if rows.ndim != 2 or rows.shape[1] != p or rows.dtype != dtype:
        raise ValueError(f"x must have shape (B, {p}) and dtype {dtype}, got {rows.shape} and {rows.dtype}")
    return rows


@torch.library.custom_op("comet_moe::descend", mutates_args=())
def descend_op(
    x: Tensor,
    split_weight: Tensor,
    split_bias: Tensor,
    leaf_weight: Tensor,
    leaf_bias: Tensor,
    gamma: float,
) -> Tensor:
    """(B, p) and the gate's parameters -> weights (B, n); NaN in rows that meet a logit of NaN."""
    trees = read_trees((split_weight, split_bias, leaf_weight, leaf_bias), x.dtype)
    descent = descend(x, trees, gamma)
    if not descent.finite:
        return _evaluate_all_nodes(x, trees, gamma)
    weights = x.new_zeros(len(x), leaf_bias.shape[1])
    if descent.fits:
        expert, weight = torch.from_numpy(descent.expert), torch.from_numpy(descent.weight)
        return weights.scatter_add_(1, expert, weight)
    sample, expert, weight = descend_again(x, trees, gamma, descent)
    return weights.index_put_((sample, expert), weight)


def _evaluate_all_nodes(x: Tensor, trees: Trees, gamma: float) -> Tensor:
    """The weights (B, n) as the dense gate makes them, which keeps a NaN in its own row."""
    split_weight, split_bias, leaf_weight, leaf_bias = map(torch.from_numpy, trees)
    splits = F.linear(x, split_weight.flatten(0, 1), split_bias.flatten())
    alphas = F.linear(x, leaf_weight.flatten(0, 1), leaf_bias.flatten())
    rows = len(x)
    trees_of_rows = soft_trees(
        splits.reshape(rows, *split_bias.shape), alphas.reshape(rows, *leaf_bias.shape), gamma
    )
    return trees_of_rows.weights


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
    """Two per feature of each node and leaf that was visited; of all of them where x has no values."""
    *tensors, gamma = parameters
    if not is_plain_cpu(x):
        k, n, p = tensors[2].shape
        return 2 * x.shape[0] * p * k * (2 * n - 1)
    return 2 * x.shape[1] * descend(x, read_trees(tensors, x.dtype), gamma).visited
