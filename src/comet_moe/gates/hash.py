"""Hash routing (Roller et al. 2021): every key belongs to some experts, chosen before training."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe import checks
from comet_moe.gates.base import Gate
from comet_moe.gates.registry import Positive, Size, register_gate
from comet_moe.routing import Routing


class HashGate(Gate):
    r"""k fixed experts for each key, such as a user or a token id; at most their weights are trained.

    The experts T of each key are drawn uniformly at random from ``seed`` and stored with the model.
    :meth:`balanced` assigns the keys so that all experts have about the same load. With learned weights and
    scores s of logits Wx + b,

    .. math:: g(x)_i = \mathrm{scale} \cdot \frac{s_i}{\sum_{j \in T} s_j} \; (i \in T), \qquad
        g(x)_i = 0 \; (i \notin T)

    This is the router of the first layers of DeepSeek-V4, with k=6, ``score="sqrtsoftplus"`` and
    ``scale=1.5``.

    Args:
        num_keys: v, keys are 0..v-1.
        num_experts: n.
        seed: seed of the random assignment.
        k: different experts per key; more than n means n.
        weights: "uniform" gives each of the k experts the weight scale / k; "learned" needs ``in_features``
            and at least 2 experts per key.
        in_features: p, for learned weights.
        score: s of learned weights: "softmax", "sigmoid" or "sqrtsoftplus", which is sqrt(log(1 + exp)).
        scale: sum of the weights of a row.

    Attributes:
        assignment: (v,) int64, the expert of each key; (v, k) for k of at least 2. The first column is the
            assignment with k=1 and the same seed.
        weight, bias: (n, p), (n,), Glorot-uniform and zero at the start; None for uniform weights.

    Example:
        >>> import torch
        >>> from comet_moe.gates import HashGate
        >>> gate = HashGate(num_keys=1000, num_experts=6)
        >>> keys = torch.tensor([7, 999, 7])
        >>> routing = gate(torch.randn(3, 32), keys=keys)
        >>> bool((routing.weights.argmax(-1) == gate.assignment[keys]).all())
        True
    """

    assignment: Tensor
    k: int
    has_logits = False

    def __init__(
        self,
        num_keys: int,
        num_experts: int,
        seed: int = 0,
        k: int = 1,
        weights: Literal["uniform", "learned"] = "uniform",
        in_features: int | None = None,
        score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax",
        scale: float = 1.0,
    ):
        super().__init__()
        self.num_keys = checks.at_least_one("num_keys", num_keys)
        self.num_experts = checks.at_least_one("num_experts", num_experts)
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"seed must be an integer in 0..2**63 - 1, got {seed!r}")
        self.k = min(checks.at_least_one("k", k), num_experts)
        self.weights, self.score = weights, score
        self.scale = checks.positive("scale", scale)
        self.sums_to_one, self.max_weight_sum = scale == 1, self.scale
        self.seed = seed
        shape = (num_keys,) if self.k == 1 else (num_keys, self.k)
        self.register_buffer("assignment", torch.empty(shape, dtype=torch.int64))
        self._check_weights(in_features)
        self.in_features = in_features
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if weights == "learned" and in_features is not None:
            self.weight = nn.Parameter(torch.empty(num_experts, in_features))
            self.bias = nn.Parameter(torch.empty(num_experts))
        self.reset_parameters()

    def _check_weights(self, in_features: int | None) -> None:
        """ValueError for arguments that do not fit each other."""
        if self.weights not in ("uniform", "learned"):
            raise ValueError(f'weights must be "uniform" or "learned", got {self.weights!r}')
        if self.score not in ("softmax", "sigmoid", "sqrtsoftplus"):
            raise ValueError(f'score must be "softmax", "sigmoid" or "sqrtsoftplus", got {self.score!r}')
        if in_features is not None:
            checks.at_least_one("in_features", in_features)
        elif self.weights == "learned":
            raise ValueError('weights="learned" reads features: pass in_features')
        if self.weights == "learned" and self.k == 1:
            raise ValueError(
                f'weights="learned" needs at least 2 experts per key, got k={self.k}: one weight is constant'
            )

    def reset_parameters(self) -> None:
        """Draw the table from the seed; Glorot-uniform weight, zero bias."""
        with torch.no_grad():
            self.assignment.copy_(_draw(self.num_keys, self.num_experts, self.k, self.seed))
        if self.weight is not None and self.bias is not None:
            nn.init.xavier_uniform_(self.weight)
            nn.init.zeros_(self.bias)

    def flops(self) -> int:
        """Operations on one row: one logit per expert if weights are learned."""
        return 0 if self.weight is None else 2 * self.weight.numel()

    @classmethod
    def balanced(cls, frequencies: Tensor, num_experts: int) -> "HashGate":
        """A gate with even load: keys by falling frequency, each to the expert with the least load so far.

        Args:
            frequencies: (v,) how often each key occurs.
            num_experts: n.

        Example:
            >>> import torch
            >>> from comet_moe.gates import HashGate
            >>> HashGate.balanced(torch.tensor([5, 3, 2]), num_experts=2).assignment
            tensor([0, 1, 1])
        """
        if frequencies.dim() != 1:
            raise ValueError(f"frequencies must be a vector (keys,), got shape {tuple(frequencies.shape)}")
        bad = frequencies[~((frequencies >= 0) & frequencies.isfinite())]
        if len(bad):
            raise ValueError(f"frequencies must be finite numbers of at least 0, got {bad[0].item():g}")
        gate = cls(frequencies.numel(), num_experts)
        load = [0.0] * num_experts
        counts = frequencies.double()
        for key in counts.argsort(descending=True, stable=True).tolist():
            lightest = min(range(num_experts), key=load.__getitem__)
            gate.assignment[key] = lightest
            load[lightest] += float(counts[key])
        return gate

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Route by ``keys`` (B, ...) int64; of ``x`` (B, ..., p) only shape and dtype are used."""
        if keys is None:
            raise ValueError(f"a HashGate needs keys of shape {tuple(x.shape[:-1])}, got None")
        if mask is not None:
            keys = keys.masked_fill(~mask, 0)  # padding may have any id
        checks.require_key_range(keys, self.num_keys)
        experts = self.assignment[keys].reshape(*keys.shape, self.k)
        weights = self._weights(x, experts)
        if weights.requires_grad:
            dense = weights.new_zeros(*keys.shape, self.num_experts).scatter(-1, experts, weights)
            routing = Routing(weights=dense)
            routing.most_experts = self.k
            return routing
        slots = (experts.reshape(-1, self.k), weights.reshape(-1, self.k))
        return Routing.from_slots(*slots, x.shape[:-1], self.num_experts)

    def _weights(self, x: Tensor, experts: Tensor) -> Tensor:
        """(B, ..., k), divided by their sum in logarithms, so that there is no 0 / 0."""
        if self.weight is None or self.bias is None:
            return x.new_full(experts.shape, self.scale / self.k)
        logits = F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)).gather(-1, experts)
        if self.score == "sigmoid":
            logits = F.logsigmoid(logits)
        elif self.score == "sqrtsoftplus":
            # log softplus(z) is z where softplus(z) = log(1 + exp z) would underflow
            logits = torch.where(logits < -15, logits, F.softplus(logits.clamp_min(-15)).log()) / 2
        return logits.softmax(-1) * self.scale

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        given = state_dict.get(f"{prefix}assignment")
        if given is not None and not given.is_meta:
            bad = given[~((given >= 0) & (given < self.num_experts) & (given == given.long()))]
            if bad.numel():
                *_, error_messages = others
                error_messages.append(
                    f"{prefix}assignment must name experts 0..{self.num_experts - 1}, got {bad[0].item():g}"
                )
                return
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        """Shown in ``repr(gate)``."""
        k = "" if self.k == 1 else f", k={self.k}, weights={self.weights}"
        return f"num_keys={self.num_keys}, num_experts={self.num_experts}{k}"


def _draw(num_keys: int, num_experts: int, k: int, seed: int) -> Tensor:
    """(v,), or (v, k) with different experts in each row."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(num_experts, (num_keys, 1), generator=generator)
    for already in range(1, k):
        new = torch.randint(num_experts - already, (num_keys, 1), generator=generator)
        for taken in chosen.sort(-1).values.split(1, dim=-1):  # a number among the experts that are left
            new += new >= taken
        chosen = torch.cat((chosen, new), -1)
    return chosen.squeeze(-1) if k == 1 else chosen


@register_gate("hash")
def build_hash(num_keys: int, num_experts: int, seed: int = 0) -> HashGate:
    """One fixed expert for each key, such as a user or a token id; nothing is trained.

    Args:
        num_keys: v.
        num_experts: n.
        seed: of the table.
    """
    return HashGate(num_keys, num_experts, seed)


@register_gate("hash-k")
def build_hash_k(
    num_keys: int,
    num_experts: int,
    in_features: int,
    seed: int = 0,
    k: Size = 2,
    weights: Literal["uniform", "learned"] = "learned",
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax",
    scale: Positive = 1.0,
) -> HashGate:
    """The k fixed experts of each key, with weights that are learned.

    Args:
        num_keys: v.
        num_experts: n.
        in_features: p.
        seed: of the table.
        k: number of experts per sample.
        weights: equal (`uniform`), or `learned` from the features; at k=1 they are equal.
        score: of which learned weights are the shares.
        scale: sum of the weights of a sample.
    """
    is_learned = weights == "learned" and min(k, num_experts) > 1
    kind: Literal["uniform", "learned"] = "learned" if is_learned else "uniform"
    return HashGate(num_keys, num_experts, seed, k, kind, in_features, score, scale)
