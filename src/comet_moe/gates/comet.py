"""COMET: k differentiable decision trees choose at most k of n experts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe import checks
from comet_moe.gates.base import TrainableGate
from comet_moe.gates.losses import masked_mean, selector_entropy
from comet_moe.gates.smooth_step import log_smooth_step_sides
from comet_moe.gates.tree import path_sums
from comet_moe.kernels.descent import Nodes, descend, descend_again, descend_op, nodes_of
from comet_moe.kernels.jit import COMPILED_TYPES, can_run_compiled, is_plain_eager, is_tracing
from comet_moe.kernels.soft_trees import soft_trees
from comet_moe.routing import Pairs, Routing

_NODES = ("split_weight", "split_bias", "leaf_weight", "leaf_bias")


class CometGate(TrainableGate):
    r"""The COMET gate (Ibrahim et al. 2023).

    Tree j sends a sample left at node q with probability h(w_q·x + b_q), h the smooth-step of width
    ``gamma``; v_i^{(j)} is the product of the branch probabilities on the path to leaf i. With α affine,

    .. math:: g(x)_i = \frac{\sum_j \exp(α_i^{(j)}) v_i^{(j)}}{\sum_{j,i} \exp(α_i^{(j)}) v_i^{(j)}}

    computed as one softmax over trees and leaves of α + log v. Once every tree is one-hot, at most k
    weights are nonzero. Evaluation under ``torch.no_grad()`` descends the trees: O(k p log n) a sample, no
    tensor of size (B, n), and no ``selectors``. In training the penalty is
    ``entropy`` · mean_b Σ_j Σ_i -v log(v + 1e-6).

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
    checks_values = True
    _in_memory: Nodes | None = None

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

    def flops(self) -> int:
        """Of all splits and leaves of all trees, for one row."""
        return 2 * self.in_features * self.k * (2 * self.num_experts - 1)

    def idle_parameters(self) -> set[str]:
        """With one expert there is nothing to decide."""
        return {name for name, _ in self.named_parameters()} if self.num_experts == 1 else set()

    def __call__(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Route ``x``; for plain rows in evaluation, without the microseconds of checks and hooks."""
        if (
            keys is None
            and mask is None
            and not (
                self.training or self.keeps_contributions or self._forward_hooks or self._forward_pre_hooks
            )
            and type(x) is Tensor
            and is_plain_eager()
        ):
            shape = x.shape
            if (
                len(shape) == 2
                and shape[1] == self.in_features
                and x.dtype is self._parameters["leaf_bias"].dtype  # type: ignore[union-attr]
                and x.dtype in COMPILED_TYPES
                and x.is_cpu
                and x.is_contiguous()
            ):
                return self._walked(x, shape[:1])  # type: ignore[arg-type]  # a Size, too
        return super().__call__(x, keys=keys, mask=mask)

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """In evaluation without gradients the trees are descended; otherwise every node is evaluated."""
        return self._descended(x) if self._descends(x) else self._dense(x, mask)

    def _dense(self, x: Tensor, mask: Tensor | None) -> Routing:
        checks.finite(x)
        splits, alphas = self._nodes(x)
        weights, contributions, paths, entropy = self._trees(splits, alphas)
        aux_loss = None
        if self.training and self.entropy > 0:
            aux_loss = self.entropy * masked_mean(entropy, mask)
        return Routing(weights=weights, aux_loss=aux_loss, selectors=paths, contributions=contributions)

    def _trees(self, splits: Tensor, alphas: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weights (B, ..., n), contributions and paths (B, ..., k, n), entropy (B, ...) of all trees."""
        if not can_run_compiled(splits, alphas):
            return self._trees_torch(splits, alphas)
        batch_shape = alphas.shape[:-2]
        flat = soft_trees(splits.flatten(0, -3), alphas.flatten(0, -3), self.gamma)
        weights, contributions, paths, entropy = (value.unflatten(0, batch_shape) for value in flat)
        return weights, contributions, paths, entropy

    def _trees_torch(self, splits: Tensor, alphas: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The definition: log-space paths and a two-way softmax."""
        log_paths = path_sums(*log_smooth_step_sides(splits, self.gamma))
        contributions = (alphas + log_paths).flatten(-2).softmax(-1).unflatten(-1, (self.k, self.num_experts))
        paths = log_paths.exp()
        return contributions.sum(-2), contributions, paths, selector_entropy(paths)

    def _descends(self, x: Tensor) -> bool:
        """Whether only the nodes on the way to the reached leaves are evaluated."""
        if self.training or self.keeps_contributions or torch.is_grad_enabled():
            return False
        return can_run_compiled(x) or is_tracing(x)

    def _descended(self, x: Tensor) -> Routing:
        batch_shape = x.shape[:-1]
        rows = x.reshape(-1, self.in_features).contiguous()
        if not is_tracing(x):
            return self._walked(rows, batch_shape)
        own: list[Any] = [self._parameters[name].to(x.dtype) for name in _NODES]  # type: ignore[union-attr]
        weights = descend_op(rows, *own, self.gamma)
        return Routing(weights=weights.reshape(*batch_shape, self.num_experts))

    def _walked(self, rows: Tensor, batch_shape: torch.Size) -> Routing:
        """The routing of contiguous rows (rows, p), by the compiled loop."""
        nodes = self._nodes_in_memory(rows.dtype)
        reached = descend(rows, nodes, self.gamma)
        if not reached.finite:
            return self._dense(rows.reshape(*batch_shape, self.in_features), None)
        if reached.most > reached.expert.shape[1]:
            pairs = Pairs(*descend_again(rows, nodes, self.gamma, reached))
            routing = Routing.from_pairs(pairs, batch_shape, self.num_experts)
        else:
            slots = torch.from_numpy(reached.expert), torch.from_numpy(reached.weight)
            routing = Routing(slots=slots, batch_shape=batch_shape, num_experts=self.num_experts)
        routing.gate_flops = 2 * self.in_features * reached.visited
        return routing

    def _nodes_in_memory(self, dtype: torch.dtype) -> Nodes:
        """Where the parameters are; looked up anew when one has moved."""
        own: dict[str, Any] = self._parameters
        addresses = (
            own["split_weight"].data_ptr(),
            own["split_bias"].data_ptr(),
            own["leaf_weight"].data_ptr(),
            own["leaf_bias"].data_ptr(),
        )
        known = self._in_memory
        if known is not None and known.addresses == addresses:
            return known
        found = nodes_of([own[name] for name in _NODES], dtype)
        if found.addresses == addresses:  # copies, of half precision say, do not follow the parameters
            self._in_memory = found
        return found

    def _own_dtype(self, x: Tensor) -> torch.dtype:
        bias = self._parameters["leaf_bias"]
        assert bias is not None
        return bias.dtype

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_in_memory": None}

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
