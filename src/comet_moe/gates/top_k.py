"""Top-k (Shazeer et al. 2017): keep the k largest logits."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe import checks
from comet_moe.gates.base import TrainableGate
from comet_moe.routing import Routing


def default_normalize(k: int) -> Literal["selected", "all"]:
    """The ``normalize`` with which a gate of ``k`` experts trains: at k=1 "selected" is constant."""
    return "all" if k == 1 else "selected"


class TopKGate(TrainableGate):
    """Logits Wx + b; the k largest are kept, the others get weight 0.

    ``routing.logits`` are the logits that were compared: in training with their noise.

    Args:
        in_features: p.
        num_experts: n.
        k: number of experts per sample; more than n means n.
        noise: add N(0, 1) · softplus(W_noise x) to the logits in training.
        normalize: "selected" is a softmax over the kept logits (at k=1 that is the constant 1, and the gate
            does not train); "all" keeps the probabilities of the softmax over all n, which do not sum to 1.

    Attributes:
        weight, bias: (n, p), (n,), Glorot-uniform and zero at the start.
        noise_weight: (n, p) zero at the start, or None.

    Example:
        >>> import torch
        >>> from comet_moe.gates import TopKGate
        >>> gate = TopKGate(in_features=32, num_experts=6, k=2)
        >>> gate(torch.randn(4, 32)).weights.count_nonzero(-1)
        tensor([2, 2, 2, 2])
    """

    k: int

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        k: int = 1,
        noise: bool = False,
        normalize: Literal["selected", "all"] = "selected",
    ):
        super().__init__(in_features, num_experts)
        self.k = min(checks.at_least_one("k", k), num_experts)
        if normalize not in ("selected", "all"):
            raise ValueError(f'normalize must be "selected" or "all", got {normalize!r}')
        self.normalize = normalize
        self.sums_to_one = normalize == "selected" or self.k == num_experts
        self.stochastic = noise
        self.weight = nn.Parameter(torch.empty(num_experts, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts))
        self.noise_weight = nn.Parameter(torch.empty(num_experts, in_features)) if noise else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot-uniform weight, zero bias, zero noise weight."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)
        if self.noise_weight is not None:
            nn.init.zeros_(self.noise_weight)

    def flops(self) -> int:
        """Operations on one row: one logit per expert, and as many for the noise in training."""
        has_noise = self.training and self.noise_weight is not None
        return 2 * self.in_features * self.num_experts * (2 if has_noise else 1)

    def idle_parameters(self) -> set[str]:
        """All parameters if the softmax is over one logit, which makes it 1."""
        softmax_over = self.k if self.normalize == "selected" else self.num_experts
        return {name for name, _ in self.named_parameters()} if softmax_over == 1 else set()

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """One linear map, the k largest logits, and the softmax that ``normalize`` names."""
        logits = self._logits(x)
        selected, experts = logits.topk(self.k, dim=-1)
        if self.normalize == "selected":
            weights = selected.softmax(-1)
        else:
            weights = (selected - logits.logsumexp(-1, keepdim=True)).exp()
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            dense = weights.new_zeros(logits.shape).scatter(-1, experts, weights)
            return Routing(weights=dense, logits=logits)
        return Routing(
            slots=(experts.reshape(-1, self.k), weights.reshape(-1, self.k)),
            batch_shape=x.shape[:-1],
            num_experts=self.num_experts,
            logits=logits,
        )

    def _logits(self, x: Tensor) -> Tensor:
        """(B, ..., n), with noise in training."""
        logits = F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))
        if self.training and self.noise_weight is not None:
            scale = F.softplus(F.linear(x, self.noise_weight.to(x.dtype)))
            logits = logits + torch.randn_like(logits) * scale
        return logits
