"""Top-k: the k experts of the largest scores (Shazeer et al. 2017; Switch; Mixtral; DeepSeek-V3)."""

import warnings
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe import checks
from comet_moe.exceptions import IdleGateWarning
from comet_moe.gates.base import LinearGate, SteppedGate
from comet_moe.gates.quantile import BINS, count_margins, move_to_quantile
from comet_moe.gates.ranks import sum_over_ranks
from comet_moe.gates.registry import NotNegative, Positive, Size, register_gate
from comet_moe.routing import Routing


class TopKGate(LinearGate, SteppedGate):
    r"""The k experts of largest s + balance_bias, with scores s = softmax(Wx + b) or a sigmoid of each logit.

    With T the set of the chosen ones, and without the balancing bias,

    .. math:: g(x)_i = \mathrm{scale} \cdot \frac{s_i}{\sum_{j \in T} s_j} \; (i \in T), \qquad
        g(x)_i = 0 \; (i \notin T)

    This is the router of most mixtures. As it is, it is that of Mixtral and Qwen3-MoE; with ``noise``, that
    of Shazeer et al. (2017). Switch (Fedus et al. 2021) has k=1 and ``normalize="all"``. DeepSeek-V3 (2024)
    has ``score="sigmoid"``, ``groups``, ``scale`` and ``bias_update=1e-3``. Use it where the cost per row has
    to be fixed. Alone it tends to overload a few experts: give it a ``bias_update`` or a load-balance loss.

    ``bias_update`` is loss-free balancing (Wang et al. 2024): after each optimiser step
    :func:`comet_moe.step` moves the balancing bias of each expert by ``bias_update``. It goes up for an
    expert that was chosen less often than the average, and down for one chosen more often. The bias decides
    who is chosen, never a weight, so it adds no gradient. 0.001 is usual; larger values balance sooner, and
    swing more around the balance. The step is in units of the scores. Softmax scores differ by about 1/n,
    so that a step which suits sigmoid scores may swing around the balance with them.

    ``balance="quantile"`` has no such step. After each optimiser step the bias of expert j moves to the k/n
    quantile of α - s_j. It is taken over the rows of all ranks since the last step. α lies between the k-th
    and the (k+1)-th largest s + balance_bias of a row. With this bias, these rows would load all experts
    about alike. Evaluation uses the last bias.

    ``routing.logits`` are the logits that were compared: in training with their noise.

    Args:
        in_features: p.
        num_experts: n.
        k: number of experts per sample; more than n means n.
        noise: add N(0, 1) · softplus(W_noise x) to the logits in training.
        normalize: "selected" divides the scores of the chosen by their sum; "all" keeps them as they are. At
            k=1 "selected" is the constant 1, and the gate does not train.
        score: "softmax" over all n, or "sigmoid" of each logit by itself.
        bias_update: how far the balancing bias moves in each step; 0 for no balancing.
        groups: number of groups of n / groups neighbouring experts.
        top_groups: choose only among the experts of these many groups, those with the largest sum of their
            two largest s + balance_bias.
        scale: factor of all weights.
        balance: "quantile", or None for balancing by ``bias_update`` or none.

    Attributes:
        weight, bias: (n, p), (n,), Glorot-uniform and zero at the start.
        noise_weight: (n, p) zero at the start, or None.
        balance_bias: (n,) buffer, zero at the start; None if scores are a softmax in one group without
            balancing, where the largest logits are chosen.
        choice_counts: (n,) buffer, how often each expert was chosen in training passes since the last step,
            padding left out; not part of the ``state_dict``. None without ``bias_update``.
        margins: (n, 1000) buffer, histograms of the margins in training passes since the last step; not part
            of the ``state_dict``. None without ``balance``.

    Example:
        >>> import torch, comet_moe
        >>> from comet_moe.gates import TopKGate
        >>> gate = TopKGate(in_features=32, num_experts=6, k=2)
        >>> gate(torch.randn(4, 32)).weights.count_nonzero(-1)
        tensor([2, 2, 2, 2])
        >>> gate = TopKGate(32, 8, k=2, score="sigmoid", groups=4, top_groups=2, bias_update=0.001)
        >>> routing = gate(torch.randn(4, 32))
        >>> comet_moe.step(gate)
        >>> float(gate.balance_bias.abs().max())
        0.0010...
    """

    k: int
    balance_bias: Tensor | None
    choice_counts: Tensor | None
    margins: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        k: int = 1,
        noise: bool = False,
        normalize: Literal["selected", "all"] = "selected",
        score: Literal["softmax", "sigmoid"] = "softmax",
        bias_update: float = 0.0,
        groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
        balance: Literal["quantile"] | None = None,
    ):
        super().__init__(in_features, num_experts)
        self.k = min(checks.at_least_one("k", k), num_experts)
        if normalize not in ("selected", "all"):
            raise ValueError(f'normalize must be "selected" or "all", got {normalize!r}')
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f'score must be "softmax" or "sigmoid", got {score!r}')
        _check_groups(num_experts, self.k, groups, top_groups)
        _check_balance(balance, bias_update, groups, top_groups)
        self.normalize = normalize
        self.score = score
        self.bias_update = checks.not_negative("bias_update", bias_update)
        self.balance = balance
        self.groups = groups
        self.top_groups = top_groups
        self.scale = checks.positive("scale", scale)
        is_distribution = normalize == "selected" or (score == "softmax" and self.k == num_experts)
        self.sums_to_one = is_distribution and scale == 1
        self.max_weight_sum = self.scale * (self.k if score == "sigmoid" and normalize == "all" else 1)
        self.stochastic = noise
        self.noise_weight = nn.Parameter(torch.empty(num_experts, in_features)) if noise else None
        is_balanced = self.moves_in_training = bias_update > 0 or balance is not None
        self.chooses_by_logits = score == "softmax" and top_groups == groups and not is_balanced
        balance_bias = None if self.chooses_by_logits else torch.zeros(num_experts)
        self.register_buffer("balance_bias", balance_bias)
        counts = torch.zeros(num_experts, dtype=torch.int64) if bias_update > 0 else None
        self.register_buffer("choice_counts", counts, persistent=False)
        margins = torch.zeros(num_experts, BINS, dtype=torch.int64) if balance == "quantile" else None
        self.register_buffer("margins", margins, persistent=False)
        self.reset_parameters()
        if normalize == "selected" and self.k == 1 and num_experts > 1:
            warnings.warn(
                'a TopKGate with k=1 and normalize="selected" has the constant weight 1 and does not train: '
                'use normalize="all", or k > 1',
                IdleGateWarning,
                stacklevel=2,
            )

    def reset_parameters(self) -> None:
        """Glorot-uniform weight, zero bias, zero noise weight, zero balancing bias."""
        super().reset_parameters()
        for zero in (self.noise_weight, self.balance_bias, self.choice_counts, self.margins):
            if zero is not None:
                nn.init.zeros_(zero)

    def flops(self) -> int:
        """Operations on one row: one logit per expert, and as many for the noise in training."""
        has_noise = self.training and self.noise_weight is not None
        return super().flops() * (2 if has_noise else 1)

    def idle_parameters(self) -> set[str]:
        """All parameters if the weight is constant: one score, divided by itself."""
        is_divided = self.normalize == "selected" or (self.score == "softmax" and self.num_experts == 1)
        return {name for name, _ in self.named_parameters()} if self.k == 1 and is_divided else set()

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """One linear map, the k experts of the largest scores, and their weights."""
        logits = self._logits(x)
        if self.chooses_by_logits:
            selected, experts = logits.topk(self.k, dim=-1)
        else:
            experts = self._choose(logits.detach(), mask)
            selected = logits.gather(-1, experts)
        if self.training and self.bias_update > 0:
            self._count(experts, mask)
        weights = self._weights(selected, logits)
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            dense = weights.new_zeros(logits.shape).scatter(-1, experts, weights)
            routing = Routing(weights=dense, logits=logits)
            routing.most_experts = self.k
            return routing
        return Routing(
            slots=(experts.reshape(-1, self.k), weights.reshape(-1, self.k)),
            batch_shape=x.shape[:-1],
            num_experts=self.num_experts,
            logits=logits,
        )

    @torch.no_grad()
    def step(self) -> None:
        """Move the balancing bias by the choices or the margins since the last step, of all ranks."""
        if self.balance_bias is not None and self.margins is not None:
            move_to_quantile(self.balance_bias, self.margins, self.k, self.ranks)
            self.margins.zero_()
        if self.balance_bias is None or self.choice_counts is None:
            return
        counts = sum_over_ranks(self.choice_counts, self.ranks)
        missing = (counts.sum() - self.num_experts * counts).sign()  # 1 for an expert below the average
        self.balance_bias.add_(missing, alpha=self.bias_update)
        self.choice_counts.zero_()

    def _logits(self, x: Tensor) -> Tensor:
        """(B, ..., n), with noise in training."""
        logits = super()._logits(x)
        if self.training and self.noise_weight is not None:
            scale = F.softplus(F.linear(x, self.noise_weight.to(x.dtype)))
            logits = logits + torch.randn_like(logits) * scale
        return logits

    def _choose(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """(B, ..., k) experts by score and bias, within the top groups; in training counts margins."""
        assert self.balance_bias is not None
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        scores = scores + self.balance_bias.to(scores.dtype)
        if self.training and self.margins is not None and self.k < self.num_experts:
            count_margins(self.margins, scores, self.k, mask)
        if self.top_groups < self.groups:
            by_group = scores.unflatten(-1, (self.groups, -1))
            best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
            kept = torch.zeros_like(best, dtype=torch.bool)
            kept = kept.scatter(-1, best.topk(self.top_groups, dim=-1).indices, True)
            scores = by_group.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(self.k, dim=-1).indices

    def _weights(self, selected: Tensor, logits: Tensor) -> Tensor:
        """(B, ..., k) from the logits of the chosen; divided by their sum in logarithms, never 0 / 0."""
        if self.score == "softmax" and self.normalize == "selected":
            weights = selected.softmax(-1)
        elif self.score == "softmax":
            weights = (selected - logits.logsumexp(-1, keepdim=True)).exp()
        elif self.normalize == "selected":
            weights = F.logsigmoid(selected).softmax(-1)
        else:
            weights = selected.sigmoid()
        return self._scaled(weights)

    def _count(self, experts: Tensor, mask: Tensor | None) -> None:
        """Add the choices (B, ..., k) of the rows that are not padding to ``choice_counts``."""
        assert self.choice_counts is not None
        is_row = torch.ones_like(experts) if mask is None else mask.unsqueeze(-1).expand_as(experts).long()
        self.choice_counts.index_add_(0, experts.flatten(), is_row.flatten())


def _check_groups(num_experts: int, k: int, groups: int, top_groups: int) -> None:
    checks.at_least_one("groups", groups)
    checks.at_least_one("top_groups", top_groups)
    if num_experts % groups:
        raise ValueError(f"groups must divide the number of experts, {num_experts}, got {groups}")
    if top_groups > groups:
        raise ValueError(f"top_groups must be at most groups, {groups}, got {top_groups}")
    choosable = top_groups * (num_experts // groups)
    if k > choosable:
        raise ValueError(
            f"k must be at most {choosable}, the experts in {top_groups} of {groups} groups, got {k}"
        )


def _check_balance(balance: object, bias_update: float, groups: int, top_groups: int) -> None:
    if balance not in (None, "quantile"):
        raise ValueError(f'balance must be "quantile" or None, got {balance!r}')
    if balance and bias_update:
        raise ValueError(f"balance and bias_update both move the bias: set bias_update, {bias_update}, to 0")
    if balance and top_groups < groups:
        raise ValueError(
            f"quantile balancing is for a choice among all experts, got top_groups={top_groups} of {groups} "
            "groups: set top_groups to groups, or use bias_update"
        )


@register_gate("topk")
def build_topk(
    in_features: int,
    num_experts: int,
    k: Size = 2,
    noise: bool = False,
    normalize: Literal["selected", "all"] | None = None,
    bias_update: NotNegative = 0.0,
    groups: Size = 1,
    top_groups: Size = 1,
    scale: Positive = 1.0,
    balance: Literal["quantile"] | None = None,
) -> TopKGate:
    """The k experts with the largest logits.

    Args:
        in_features: p.
        num_experts: n.
        k: number of experts per sample.
        noise: add trainable Gaussian noise to the logits in training.
        normalize: softmax over the selected logits or over all; null is `all` at k=1, where the gate learns
            only so, else `selected`.
        bias_update: change per step of the bias that balances the choice without a loss.
        groups: groups into which the experts are divided.
        top_groups: number of best groups, whose experts can be chosen.
        scale: factor on the weights.
        balance: `quantile` sets the bias so that the last batch would load all experts alike; null leaves it
            to `bias_update`.
    """
    return TopKGate(
        in_features,
        num_experts,
        k,
        noise,
        normalize or default_normalize(k),
        bias_update=bias_update,
        groups=groups,
        top_groups=top_groups,
        scale=scale,
        balance=balance,
    )


@register_gate("switch", load_balance=0.01)  # as in the paper of Fedus et al.
def build_switch(in_features: int, num_experts: int, noise: bool = False, scale: Positive = 1.0) -> TopKGate:
    """The one expert with the largest logit, with a load-balancing loss.

    Args:
        in_features: p.
        num_experts: n.
        noise: add trainable Gaussian noise to the logits in training.
        scale: factor on the weights.
    """
    return TopKGate(in_features, num_experts, 1, noise, "all", scale=scale)


@register_gate("sigmoid")
def build_sigmoid(
    in_features: int,
    num_experts: int,
    k: Size = 2,
    bias_update: NotNegative = 1e-3,  # as in DeepSeek-V3
    groups: Size = 1,
    top_groups: Size = 1,
    scale: Positive = 1.0,
    balance: Literal["quantile"] | None = None,
) -> TopKGate:
    """The k experts with the largest sigmoid score, balanced by a bias.

    Args:
        in_features: p.
        num_experts: n.
        k: number of experts per sample.
        bias_update: change per step of the bias that balances the choice without a loss.
        groups: groups into which the experts are divided.
        top_groups: number of best groups, whose experts can be chosen.
        scale: factor on the weights.
        balance: `quantile` sets the bias so that the last batch would load all experts alike, in place of
            `bias_update`; null leaves it to that.
    """
    return TopKGate(
        in_features,
        num_experts,
        k,
        normalize=default_normalize(k),
        score="sigmoid",
        bias_update=0.0 if balance else bias_update,
        groups=groups,
        top_groups=top_groups,
        scale=scale,
        balance=balance,
    )


def default_normalize(k: int) -> Literal["selected", "all"]:
    """The ``normalize`` with which a gate of ``k`` experts trains: at k=1 "selected" is constant."""
    return "all" if k == 1 else "selected"
