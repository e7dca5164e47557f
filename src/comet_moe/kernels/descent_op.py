"""The descent as a torch operator, for compiled and exported graphs and under dispatch modes.

It gives the weights (B, n): a graph has no room for what soft paths may need. Nodes are still evaluated only
where a sample comes by.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from comet_moe.kernels.descent import Nodes, Reached, descend, descend_again, nodes_of


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
