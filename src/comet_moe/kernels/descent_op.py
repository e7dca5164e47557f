"""The descent of a COMET gate as a torch operator, for graphs and under dispatch modes.

It returns weights (B, n), because the size of anything smaller would depend on the values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from comet_moe.kernels.descent import descend, descend_again, descent_work, read_trees
from comet_moe.kernels.jit import is_plain_cpu, is_worth_compiling, why_not_numba
from comet_moe.kernels.soft_trees import soft_trees


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
    parameters = (split_weight, split_bias, leaf_weight, leaf_bias)
    if not is_worth_compiling(descent_work(x, leaf_bias)) or why_not_numba():
        return _evaluate_all_nodes(x, parameters, gamma)
    trees = read_trees(parameters, x.dtype)
    descent = descend(x, trees, gamma)
    if not descent.finite:
        return _evaluate_all_nodes(x, parameters, gamma)
    weights = x.new_zeros(len(x), leaf_bias.shape[1])
    if descent.fits:
        return weights.scatter_add_(1, descent.expert, descent.weight)
    sample, expert, weight = descend_again(x, trees, gamma, descent)
    return weights.index_put_((sample, expert), weight)


def _evaluate_all_nodes(x: Tensor, parameters: Sequence[Tensor], gamma: float) -> Tensor:
    """The weights (B, n) as the dense gate makes them, which keeps a NaN in its own row."""
    split_weight, split_bias, leaf_weight, leaf_bias = parameters
    splits = F.linear(x, split_weight.flatten(0, 1), split_bias.flatten())
    alphas = F.linear(x, leaf_weight.flatten(0, 1), leaf_bias.flatten())
    shape = len(x), *leaf_bias.shape
    return soft_trees(splits.reshape(len(x), *split_bias.shape), alphas.reshape(shape), gamma).weights


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
    if not is_plain_cpu(x) or not is_worth_compiling(descent_work(x, tensors[3])) or why_not_numba():
        k, n, p = tensors[2].shape
        return 2 * x.shape[0] * p * k * (2 * n - 1)
    return 2 * x.shape[1] * descend(x, read_trees(tensors, x.dtype), gamma).visited
