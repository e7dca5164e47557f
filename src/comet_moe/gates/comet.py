"""COMET: k differentiable decision trees choose at most k of n experts."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe import checks
from comet_moe.gates.balance import EPSILON, balance_splits, move_statistics, node_sums
from comet_moe.gates.base import SteppedGate
from comet_moe.gates.losses import masked_mean
from comet_moe.gates.normalized_walk import NORMALIZED_EXPERTS, walk_normalized
from comet_moe.gates.ranks import sum_over_ranks
from comet_moe.gates.registry import NotNegative, Positive, Size, register_gate
from comet_moe.kernels.descent import descend, descend_again, descent_work, read_trees
from comet_moe.kernels.descent_op import descend_op
from comet_moe.kernels.jit import can_run_compiled, is_plain_cpu, needs_operator
from comet_moe.kernels.likeliest_paths import likeliest_trees_torch
from comet_moe.kernels.soft_trees import soft_trees, soft_trees_torch
from comet_moe.kernels.sparse_trees import renormalized, softmax_by_row, visit_trees
from comet_moe.kernels.tree_walk import WALK_EXPERTS, walk_trees
from comet_moe.memory import in_words
from comet_moe.routing import Pairs, Routing, TreePairs

MOST_DENSE_BYTES = 10**9
"""Memory of a pass over all nodes, beyond which soft trees are refused where rows could walk."""
DENSE_TENSORS = 11
"""Tensors (B, k, n) of a training step over all nodes."""


@register_gate("comet")
class CometGate(SteppedGate):
    r"""k decision trees whose leaves are the experts: COMET (Ibrahim et al. 2023).

    Tree j sends a sample left at node q with probability h(w_q·x + b_q), where h is the smooth step of width
    ``gamma``. v_i^{(j)} is the product of the branch probabilities on the path to leaf i. With α affine,

    .. math:: g(x)_i = \frac{\sum_j \exp(α_i^{(j)}) v_i^{(j)}}{\sum_{j,i} \exp(α_i^{(j)}) v_i^{(j)}}

    computed as one softmax over trees and leaves of α + log v, times ``scale``. Once every tree is one-hot,
    at most k weights are nonzero. Evaluation under ``torch.no_grad()`` descends the trees: O(k p log n) per
    sample, no tensor of size (B, n), and no ``selectors``. So does training on the CPU from 32 experts on
    (256 with normalised splits), where rows visit both sides of soft splits. In training the
    auxiliary loss is ``entropy`` · mean_b Σ_j Σ_i -v log(v + 1e-6).

    ``balance`` makes every node halve the rows that reach it, so that loads are even without a loss. The
    bias of a split is then no parameter. "normalize" normalises the logits w·x of a node by their mean and
    deviation over the rows of the batch. Each row is weighted by its probability of reaching the node.
    Evaluation uses running statistics, as batch normalisation does. "median" sets the bias to minus the
    running median of w·x over these rows, in training too, so that rows stay independent. Call
    :func:`comet_moe.step` after each optimiser step: it moves the statistics, by the rows of all ranks.

    ``gamma=(start, end)`` changes the width in ``gamma_steps`` optimiser steps, t of which are done:

    .. math:: γ_t = \mathrm{start} \left( \frac{\mathrm{end}}{\mathrm{start}} \right)^{
        \min(t / \mathrm{gamma\_steps}, 1)}

    ``max_paths`` is a ceiling on the cost of soft trees. At each level a row keeps at most so many nodes of a
    tree, those of the largest probability, in training and in evaluation. The probabilities of its leaves
    are divided by their sum. Nothing changes for rows that have no more paths.

    Args:
        in_features: p.
        num_experts: n, any number from 1.
        k: number of trees, and the most experts per sample once they are one-hot.
        gamma: width γ of the smooth step: a logit outside ±γ/2 is a hard choice; two numbers are the first
            and the last width.
        entropy: weight λ of the entropy loss, which makes trees one-hot.
        balance: how nodes halve their rows, `normalize` or `median`; null leaves them as they are trained.
        scale: factor on the weights, whose sum it is.
        sparse: whether gradients are sparse tensors of the nodes that were visited, as those of
            ``nn.Embedding(sparse=True)``; for :class:`comet_moe.LazyAdam`.
        gamma_steps: optimiser steps from the first width to the last.
        max_paths: the most nodes of a level of a tree that a row visits; null has no ceiling.

    Attributes:
        split_weight, split_bias: (k, n-1, p), (k, n-1), nodes in heap order.
        leaf_weight, leaf_bias: (k, n, p), (k, n), leaves from left to right.
        split_deviation, split_steps: (k, n-1) buffers with ``balance``: the running deviation of a node's
            logits, and the number of steps in which rows reached it. ``split_bias`` is a buffer, too.
        split_sums: (3, k, n-1) buffer with ``balance``: sums over the rows since the last step; not part of
            the ``state_dict``.
        progress: () buffer with two widths: the number of optimiser steps so far.
        cut_trees, walked_trees: () buffers with ``max_paths``: how often a tree had more paths for a row in
            training, and the number of (row, tree) pairs so far.

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
    split_bias: Tensor
    split_deviation: Tensor
    split_steps: Tensor
    split_sums: Tensor
    progress: Tensor
    cut_trees: Tensor
    walked_trees: Tensor
    checks_values = True
    has_logits = False
    has_trees = True

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        k: Size = 1,
        gamma: Positive | tuple[Positive, Positive] = 1.0,
        entropy: NotNegative = 0.0,
        balance: Literal["normalize", "median"] | None = None,
        scale: Positive = 1.0,
        sparse: bool = False,
        gamma_steps: Size | None = None,
        max_paths: Size | None = None,
    ):
        super().__init__(in_features, num_experts)
        self.k = checks.at_least_one("k", k)
        self.gamma, self.gamma_steps = _read_gamma(gamma, gamma_steps)
        self.entropy = checks.not_negative("entropy", entropy)
        if balance not in (None, "normalize", "median"):
            raise ValueError(f'balance must be None, "normalize" or "median", got {balance!r}')
        self.balance = balance
        self.depends_on_batch = balance == "normalize"
        self.moves_in_training = balance is not None
        self._set_scale(scale)
        self.sparse = sparse
        self.max_paths = None if max_paths is None else checks.at_least_one("max_paths", max_paths)
        nodes = k, num_experts - 1
        self.split_weight = nn.Parameter(torch.empty(*nodes, in_features))
        if balance is None:
            self.split_bias = nn.Parameter(torch.empty(nodes))
        else:
            self.register_buffer("split_bias", torch.empty(nodes))
            self.register_buffer("split_deviation", torch.empty(nodes))
            self.register_buffer("split_steps", torch.empty(nodes))
            self.register_buffer("split_sums", torch.empty(3, *nodes), persistent=False)
        self.leaf_weight = nn.Parameter(torch.empty(k, num_experts, in_features))
        self.leaf_bias = nn.Parameter(torch.empty(k, num_experts))
        if self.gamma_steps is not None:
            self.register_buffer("progress", torch.empty((), dtype=torch.int64))
        if self.max_paths is not None:
            self.register_buffer("cut_trees", torch.empty((), dtype=torch.int64))
            self.register_buffer("walked_trees", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Splits Uniform(±γ/100), leaves Uniform(±0.05): trees start soft and near uniform.

        Balanced splits start Uniform(±sqrt(3 / p)). For inputs of unit variance their logits have a deviation
        of 1, and trees with a small γ are hard from the first step.
        """
        if self.balance is None:
            limit = (self.gamma[0] if isinstance(self.gamma, tuple) else self.gamma) / 100
            for split in (self.split_weight, self.split_bias):
                nn.init.uniform_(split, -limit, limit)
        else:
            limit = (3 / self.in_features) ** 0.5
            nn.init.uniform_(self.split_weight, -limit, limit)
        for leaf in (self.leaf_weight, self.leaf_bias):
            nn.init.uniform_(leaf, -0.05, 0.05)
        for name, buffer in self.named_buffers(recurse=False):
            nn.init.constant_(buffer, float(name == "split_deviation"))

    @property
    def current_gamma(self) -> float | Tensor:
        """The width γ at this step; a scalar tensor on accelerators and in graphs: the host does not wait."""
        if not isinstance(self.gamma, tuple):
            return self.gamma
        assert self.gamma_steps is not None
        start, end = self.gamma
        if self.progress.is_cpu and checks.is_plain_eager(self.progress):
            return float(start * (end / start) ** min(int(self.progress) / self.gamma_steps, 1.0))
        share = (self.progress / self.gamma_steps).clamp(max=1.0)
        return start * torch.pow(end / start, share)

    @torch.no_grad()
    def step(self) -> None:
        """Count one optimiser step, and move the statistics of balanced splits by the rows of all ranks."""
        if self.gamma_steps is not None:
            self.progress.add_(1)
        if self.balance is not None:
            sums = sum_over_ranks(self.split_sums, self.ranks)
            statistics = (self.split_bias, self.split_deviation, self.split_steps)
            move_statistics(sums, *statistics, self.balance == "normalize")
            self.split_sums.zero_()

    def flops(self) -> int:
        """Operations on one row: all splits and leaves of all trees."""
        return 2 * self.in_features * self.k * (2 * self.num_experts - 1)

    def idle_parameters(self) -> set[str]:
        """All parameters if there is one expert."""
        return {name for name, _ in self.named_parameters()} if self.num_experts == 1 else set()

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Rows descend the trees where compiled loops run; otherwise every node is evaluated."""
        width = self.current_gamma
        needs_nodes = self.keeps_contributions or isinstance(width, Tensor) or self.max_paths is not None
        if self.training or needs_nodes or torch.is_grad_enabled():
            routing = self._route_by_walk(x, mask, width)
            return self._route_dense(x, mask, width) if routing is None else routing
        assert not isinstance(width, Tensor)
        if needs_operator(x):
            return self._route_as_operator(x, width)
        parameters = self._read_parameters()
        if can_run_compiled(descent_work(x, parameters[-1]), x) and all(map(is_plain_cpu, parameters)):
            return self._route_by_descent(x, parameters, width)
        return self._route_dense(x, mask, width)

    def _read_parameters(self) -> list[Tensor]:
        """Weights and biases of splits and leaves in evaluation, as attribute access gives them.

        A parameter in the module's own dictionary is read from there, which takes a tenth of the time. One
        that is computed (``parametrize``, ``prune``, ``weight_norm``) is not in it.
        """
        own: dict[str, Any] = self._parameters
        names = ("split_weight", "split_bias", "leaf_weight", "leaf_bias")
        parameters = [own[name] if name in own else getattr(self, name) for name in names]
        if self.balance == "normalize":
            split_weight, split_bias, *leaves = parameters
            rate = self._running_rate(split_bias)
            return [split_weight * rate.unsqueeze(-1).to(split_weight.dtype), split_bias * rate, *leaves]
        return parameters

    def _running_rate(self, like: Tensor) -> Tensor:
        """(k, n-1), the factor that normalises the logits of a node in evaluation."""
        return (self.split_deviation.square() + EPSILON).rsqrt().to(like.dtype)

    def _route_dense(self, x: Tensor, mask: Tensor | None, width: float | Tensor) -> Routing:
        checks.require_finite(x)
        splits, alphas = (logits.flatten(0, -3) for logits in self._logits(x))
        splits = self._balance(splits, mask, width)
        if self.max_paths is not None:
            trees, is_cut = likeliest_trees_torch(splits, alphas, width, self.max_paths)
            self._count_cut(is_cut.sum(), len(splits))
        elif isinstance(width, Tensor):
            trees = soft_trees_torch(splits, alphas, width)
        else:
            trees = soft_trees(splits, alphas, width)
        weights, contributions, paths, entropy = (value.unflatten(0, x.shape[:-1]) for value in trees)
        weights, contributions = self._scaled(weights), self._scaled(contributions)
        aux_loss = None
        if self.training and self.entropy > 0:
            aux_loss = self.entropy * masked_mean(entropy, mask, self.ranks)
        routing = Routing(weights=weights, aux_loss=aux_loss, selectors=paths, contributions=contributions)
        if self.max_paths is not None:
            routing.most_experts = min(self.num_experts, self.k * self.max_paths)
        return routing

    def _count_cut(self, cut: Tensor | int, rows: int) -> None:
        """Count the trees that had more than ``max_paths`` for a row, in training, over all ranks."""
        if self.training and self.max_paths is not None:
            cut = torch.as_tensor(cut, device=self.cut_trees.device)
            counts = torch.stack([cut, torch.full_like(cut, rows * self.k)])
            if self.ranks is not None:
                counts = sum_over_ranks(counts, self.ranks)
            self.cut_trees.add_(counts[0])
            self.walked_trees.add_(counts[1])

    def _route_by_walk(self, x: Tensor, mask: Tensor | None, width: float | Tensor) -> Routing | None:
        """The routing from visited nodes only, in pairs; None where every node is to be evaluated."""
        normalizes = self.training and self.balance == "normalize" and self.num_experts > 1
        fewest = NORMALIZED_EXPERTS if normalizes else WALK_EXPERTS
        is_small = self.num_experts < fewest or self.keeps_contributions
        # A dispatch mode, such as the FLOP counter, sees operators only.
        if is_small or isinstance(width, Tensor) or not checks.is_plain_eager(x):
            return None
        own = [self.split_weight, self.split_bias, self.leaf_weight, self.leaf_bias]
        parameters = own if normalizes else self._read_parameters()
        is_plain = all(is_plain_cpu(tensor) and tensor.dtype == x.dtype for tensor in parameters)
        if not (is_plain and can_run_compiled(descent_work(x, parameters[-1]), x)):
            return None
        rows, row_mask = x.reshape(-1, self.in_features), None if mask is None else mask.flatten()
        is_own = normalizes or self.balance != "normalize"  # else they are products, with dense gradients
        sparse = self.sparse and is_own
        if normalizes:
            walk = walk_normalized(rows, parameters, width, row_mask, self.max_paths, sparse)
        else:
            with_sums = self.training and self.balance is not None
            walk = walk_trees(rows, parameters, width, row_mask, with_sums, self.max_paths)
        if walk is None:
            self._require_dense_memory(rows)
        if walk is None or not walk.finite:
            return None
        if walk.sums is not None:
            self.split_sums.add_(walk.sums)
        self._count_cut(walk.cut, len(rows))
        visited = walk.leaf_logit, walk.leaf_log_path
        if not normalizes:
            visited = visit_trees(walk, rows, parameters, width, sparse)
        leaf_logit, log_path = renormalized(walk, *visited, len(rows), self.k, self.num_experts)
        tree, expert = walk.leaf_node // self.num_experts, walk.leaf_node % self.num_experts
        contribution = self.scale * softmax_by_row(leaf_logit, walk.leaf_row, len(rows))
        leaves = TreePairs(walk.leaf_row, tree, expert, log_path.exp(), contribution, self.k)
        aux_loss = None
        if self.training and self.entropy > 0:
            aux_loss = self.entropy * masked_mean(leaves.entropy(len(rows)), row_mask, self.ranks)
        routing = Routing.from_trees(leaves, x.shape[:-1], self.num_experts, aux_loss)
        routing.gate_flops = 2 * self.in_features * walk.visited
        return routing

    def _require_dense_memory(self, rows: Tensor) -> None:
        """Refuse to evaluate every node where that needs too much memory, and another setting avoids it."""
        needed = DENSE_TENSORS * len(rows) * self.leaf_bias.numel() * rows.element_size()
        if needed > MOST_DENSE_BYTES:
            remedy = 'balance="median" with gamma=0.01, which starts hard'
            if self.balance is not None:
                remedy = f"a gamma below {self.current_gamma:g}"
            raise ValueError(
                f"the splits are soft, so that {len(rows)} rows visit most nodes of {self.num_experts} "
                f"experts, which needs {in_words(needed)} of memory, more than "
                f"{in_words(MOST_DENSE_BYTES)}: use max_paths=16, {remedy}, or fewer rows"
            )

    def _balance(self, splits: Tensor, mask: Tensor | None, width: float | Tensor) -> Tensor:
        """Logits (B, k, n-1) as ``balance`` wants them; in training, what a step needs is added up."""
        normalize = self.balance == "normalize"
        if self.balance is None or not self.training:
            return splits * self._running_rate(splits) if normalize else splits
        rows = None if mask is None else mask.flatten()
        balanced, reached = balance_splits(splits, width, rows, normalize, self.max_paths)
        with torch.no_grad():
            sums = node_sums(splits.detach(), reached, normalize)
            self.split_sums.add_(torch.stack([values.sum(0) for values in sums]))
        return balanced

    def _route_as_operator(self, x: Tensor, width: float) -> Routing:
        """The descent as an operator of a graph."""
        rows = x.reshape(-1, self.in_features)
        parameters = (parameter.to(x.dtype) for parameter in self._read_parameters())
        weights = descend_op(rows, *parameters, width)
        return Routing(weights=self._scaled(weights).reshape(*x.shape[:-1], self.num_experts))

    def _route_by_descent(self, x: Tensor, parameters: list[Tensor], width: float) -> Routing:
        batch_shape = x.shape[:-1]
        rows = x if len(batch_shape) == 1 else x.reshape(-1, self.in_features)
        trees = read_trees(parameters, x.dtype)
        descent = descend(rows, trees, width)
        if not descent.finite:
            return self._route_dense(x, None, width)
        if descent.fits:
            weight = self._scaled(descent.weight)
            routing = Routing.from_slots(descent.expert, weight, batch_shape, self.num_experts)
        else:
            sample, expert, weight = descend_again(rows, trees, width, descent)
            pairs = Pairs(sample, expert, self._scaled(weight))
            routing = Routing.from_pairs(pairs, batch_shape, self.num_experts, is_ordered=True)
        routing.gate_flops = 2 * self.in_features * descent.visited
        return routing

    def _logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split logits (B, ..., k, n-1) and leaf logits α (B, ..., k, n)."""
        weight = torch.cat((self.split_weight, self.leaf_weight), 1).flatten(0, 1)
        bias = torch.cat((self.split_bias.to(x.dtype), self.leaf_bias.to(x.dtype)), 1).flatten()
        logits = F.linear(x, weight.to(x.dtype), bias)
        logits = logits.unflatten(-1, (self.k, 2 * self.num_experts - 1))
        return logits[..., : self.num_experts - 1], logits[..., self.num_experts - 1 :]

    def extra_repr(self) -> str:
        """Shown in ``repr(gate)``."""
        gamma = self.gamma if isinstance(self.gamma, tuple) else f"{self.gamma:g}"
        scale = None if self.scale == 1 else self.scale
        changed = {"balance": self.balance, "scale": scale, "max_paths": self.max_paths}
        more = "".join(f", {name}={value}" for name, value in changed.items() if value is not None)
        return f"{super().extra_repr()}, gamma={gamma}, entropy={self.entropy:g}{more}"


def _read_gamma(gamma: Any, steps: int | None) -> tuple[float | tuple[float, float], int | None]:
    """The width or both widths of a schedule, and its number of steps."""
    if not isinstance(gamma, list | tuple):
        if steps is not None:
            raise ValueError(
                f"gamma_steps is {steps!r} and gamma the one number {gamma!r}: give gamma=(start, end), or "
                "leave gamma_steps out"
            )
        return checks.positive("gamma", gamma), None
    start, end = (checks.positive("gamma", width) for width in checks.two_ends("gamma", gamma))
    if steps is None:
        raise ValueError(f"gamma=({start:g}, {end:g}) needs gamma_steps, the optimiser steps between the two")
    return (start, end), checks.at_least_one("gamma_steps", steps)
