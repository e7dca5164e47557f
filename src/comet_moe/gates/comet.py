"""COMET: k differentiable decision trees choose at most k of n experts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe import checks
from comet_moe.gates.base import TrainableGate
from comet_moe.gates.losses import masked_mean
from comet_moe.gates.registry import NotNegative, Positive, Size, register_gate
from comet_moe.kernels.descent import descend, descend_again, descend_op, descent_work, read_trees
from comet_moe.kernels.jit import can_run_compiled, is_plain_cpu, needs_operator
from comet_moe.kernels.soft_trees import soft_trees
from comet_moe.routing import Pairs, Routing


@register_gate("comet")
class CometGate(TrainableGate):
    r"""k decision trees whose leaves are the experts: COMET (Ibrahim et al. 2023).

    Tree j sends a sample left at node q with probability h(w_q·x + b_q), where h is the smooth step of width
    ``gamma``. v_i^{(j)} is the product of the branch probabilities on the path to leaf i. With α affine,

    .. math:: g(x)_i = \frac{\sum_j \exp(α_i^{(j)}) v_i^{(j)}}{\sum_{j,i} \exp(α_i^{(j)}) v_i^{(j)}}

    computed as one softmax over trees and leaves of α + log v. Once every tree is one-hot, at most k
    weights are nonzero. Evaluation under ``torch.no_grad()`` descends the trees: O(k p log n) per sample, no
    tensor of size (B, n), and no ``selectors``. In training the auxiliary loss is
    ``entropy`` · mean_b Σ_j Σ_i -v log(v + 1e-6).

    Args:
        in_features: p.
        num_experts: n, any number from 1.
        k: number of trees, and the most experts per sample once they are one-hot.
        gamma: width γ of the smooth step: a logit outside ±γ/2 is a hard choice.
        entropy: weight λ of the entropy loss, which makes trees one-hot.

    Attributes:
        split_weight, split_bias: (k, n-1, p), (k, n-1), nodes in heap order.
        leaf_weight, leaf_bias: (k, n, p), (k, n), leaves from left to right.

    Example:
        >>> import torch
        >>> from comet_moe.gates import CometGate
        >>> gate = CometGate(in_features=32, num_experts=6, k=2, entropy=0.1)
        >>> routing = gate(torch.randn(4, 32))
        >>> routing.weights.shape, routing.selectors.shape
        (torch.Size([4, 6]), torch.Size([4, 2, 6]))
        >>> routing.aux_loss.backward()
    """

    k: int
    checks_values = True
    has_logits = False
    has_trees = True

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        k: Size = 1,
        gamma: Positive = 1.0,
        entropy: NotNegative = 0.0,
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

    def flops(self) -> int:
        """Operations on one row: all splits and leaves of all trees."""
        return 2 * self.in_features * self.k * (2 * self.num_experts - 1)

    def idle_parameters(self) -> set[str]:
        """All parameters if there is one expert."""
        return {name for name, _ in self.named_parameters()} if self.num_experts == 1 else set()

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """In evaluation without gradients the trees are descended; otherwise every node is evaluated."""
        if self.training or self.keeps_contributions or torch.is_grad_enabled():
            return self._route_dense(x, mask)
        if needs_operator(x):
            return self._route_as_operator(x)
        parameters = self._read_parameters()
        if can_run_compiled(descent_work(x, parameters[-1]), x) and all(map(is_plain_cpu, parameters)):
            return self._route_by_descent(x, parameters)
        return self._route_dense(x, mask)

    def _read_parameters(self) -> list[Tensor]:
        """split_weight, split_bias, leaf_weight and leaf_bias, as attribute access gives them.

        A parameter in the module's own dictionary is read from there, which takes a tenth of the time. One
        that is computed (``parametrize``, ``prune``, ``weight_norm``) is not in it.
        """
        own: dict[str, Any] = self._parameters
        names = ("split_weight", "split_bias", "leaf_weight", "leaf_bias")
        return [own[name] if name in own else getattr(self, name) for name in names]

    def _route_dense(self, x: Tensor, mask: Tensor | None) -> Routing:
        checks.require_finite(x)
        splits, alphas = (logits.flatten(0, -3) for logits in self._logits(x))
        trees = soft_trees(splits, alphas, self.gamma)
        weights, contributions, paths, entropy = (value.unflatten(0, x.shape[:-1]) for value in trees)
        aux_loss = None
        if self.training and self.entropy > 0:
            aux_loss = self.entropy * masked_mean(entropy, mask, self.ranks)
        return Routing(weights=weights, aux_loss=aux_loss, selectors=paths, contributions=contributions)

    def _route_as_operator(self, x: Tensor) -> Routing:
        """The descent as an operator of a graph."""
        rows = x.reshape(-1, self.in_features)
        parameters = (parameter.to(x.dtype) for parameter in self._read_parameters())
        weights = descend_op(rows, *parameters, self.gamma)
        return Routing(weights=weights.reshape(*x.shape[:-1], self.num_experts))

    def _route_by_descent(self, x: Tensor, parameters: list[Tensor]) -> Routing:
        batch_shape = x.shape[:-1]
        rows = x if len(batch_shape) == 1 else x.reshape(-1, self.in_features)
        trees = read_trees(parameters, x.dtype)
        descent = descend(rows, trees, self.gamma)
        if not descent.finite:
            return self._route_dense(x, None)
        if descent.fits:
            expert, weight = torch.from_numpy(descent.expert), torch.from_numpy(descent.weight)
            routing = Routing.from_slots(expert, weight, batch_shape, self.num_experts)
        else:
            pairs = Pairs(*descend_again(rows, trees, self.gamma, descent))
            routing = Routing.from_pairs(pairs, batch_shape, self.num_experts, is_ordered=True)
        routing.gate_flops = 2 * self.in_features * descent.visited
        return routing

    def _logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split logits (B, ..., k, n-1) and leaf logits α (B, ..., k, n)."""
        weight = torch.cat((self.split_weight, self.leaf_weight), 1).flatten(0, 1)
        bias = torch.cat((self.split_bias, self.leaf_bias), 1).flatten()
        logits = F.linear(x, weight.to(x.dtype), bias.to(x.dtype))
        logits = logits.unflatten(-1, (self.k, 2 * self.num_experts - 1))
        return logits[..., : self.num_experts - 1], logits[..., self.num_experts - 1 :]

    def extra_repr(self) -> str:
        """Shown in ``repr(gate)``."""
        return f"{super().extra_repr()}, gamma={self.gamma:g}, entropy={self.entropy:g}"
