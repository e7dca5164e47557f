"""COMET: k differentiable decision trees choose at most k of n experts."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe import checks
from comet_moe.gates.base import TrainableGate, entropy_of, mean_over_rows
from comet_moe.gates.smooth_step import log_smooth_step_sides
from comet_moe.gates.tree import path_sums
from comet_moe.routing import Routing


class CometGate(TrainableGate):
    r"""The COMET gate (Ibrahim et al. 2023).

    Tree j sends a sample left at node q with probability h(w_q·x + b_q), h the smooth-step of width
    ``gamma``; v_i^{(j)} is the product of the branch probabilities on the path to leaf i. With α affine,

    .. math:: g(x)_i = \frac{\sum_j \exp(α_i^{(j)}) v_i^{(j)}}{\sum_{j,i} \exp(α_i^{(j)}) v_i^{(j)}}

    computed as one softmax over trees and leaves of α + log v. Once every tree is one-hot, at most k
    weights are nonzero. In training the penalty is ``entropy`` · mean_b Σ_j Σ_i -v log(v + 1e-6).

    Args:
        in_features: p.
        num_experts: n, any number from 1.
        k: number of trees.
        gamma: width of the smooth-step; splits outside (-γ/2, γ/2) are hard.
        entropy: weight λ of the entropy penalty that drives trees to one-hot.

    Attributes:
        split_weight, split_bias: (k, n-1, p), (k, n-1), nodes in heap order.
        leaf_weight, leaf_bias: (k, n, p), (k, n), leaves from left to right.

    Example:
        >>> gate = CometGate(in_features=32, num_experts=6, k=2)
        >>> gate(torch.randn(4, 32)).weights.sum(-1)
        tensor([1., 1., 1., 1.], grad_fn=...)
    """

    k: int

    def __init__(
        self, in_features: int, num_experts: int, k: int = 1, gamma: float = 1.0, entropy: float = 0.0
    ):
        super().__init__(in_features, num_experts)
        self.k = checks.at_least_one("k", k)
        self.gamma = checks.positive("gamma", gamma)
        self.entropy = checks.not_negative("entropy", entropy)
        self.split_weight = nn.Parameter(torch.empty(k, num_experts - 1, in_features))
        self.split_bias = nn.Parameter(torch.empty(k, num_experts - 1))
        self.leaf_weight = nn.Parameter(torch.empty(k, num_experts, in_features))
        self.leaf_bias = nn.Parameter(torch.empty(k, num_experts))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Splits Uniform(±γ/100), leaves Uniform(±0.05): trees start soft and near uniform."""
        for split in (self.split_weight, self.split_bias):
            split.uniform_(-self.gamma / 100, self.gamma / 100)
        for leaf in (self.leaf_weight, self.leaf_bias):
            leaf.uniform_(-0.05, 0.05)

    def idle_parameters(self) -> set[str]:
        """With one expert there is nothing to decide."""
        return {name for name, _ in self.named_parameters()} if self.num_experts == 1 else set()

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Every node of every tree in one matrix product, then log-space paths and a two-way softmax."""
        splits, alphas = self._nodes(x)
        log_left, log_right = log_smooth_step_sides(splits, self.gamma)
        log_paths = path_sums(log_left, log_right)
        parts = (alphas + log_paths).flatten(-2).softmax(-1).unflatten(-1, (self.k, self.num_experts))
        paths = log_paths.exp()
        penalty = None
        if self.training and self.entropy > 0:
            penalty = self.entropy * mean_over_rows(entropy_of(paths), mask)
        weights = parts.sum(-2)
        return Routing(weights=weights, penalty=penalty, selectors=paths, parts=parts)

    def _nodes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split logits (B, ..., k, n-1) and leaf logits α (B, ..., k, n)."""
        weight = torch.cat((self.split_weight, self.leaf_weight), 1).flatten(0, 1)
        bias = torch.cat((self.split_bias, self.leaf_bias), 1).flatten()
        logits = F.linear(x, weight.to(x.dtype), bias.to(x.dtype))
        nodes = logits.unflatten(-1, (self.k, 2 * self.num_experts - 1))
        return nodes[..., : self.num_experts - 1], nodes[..., self.num_experts - 1 :]

    def extra_repr(self) -> str:
        """Shown in ``repr(gate)``."""
        return f"{super().extra_repr()}, gamma={self.gamma:g}, entropy={self.entropy:g}"
