"""DSelect-k (Hazimeh et al. 2021): k selectors, each an expert's index in smooth binary digits."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe import checks
from comet_moe.gates.base import TrainableGate
from comet_moe.gates.losses import masked_mean, selector_entropy
from comet_moe.gates.registry import NotNegative, Positive, Size, register_gate
from comet_moe.gates.smoothing import smooth_step_sides
from comet_moe.routing import Routing, TreePairs

CODES_EXPERTS = 256
"""Number of experts from which training lists the codes that rows reach, in place of all codes."""
CODES_SHARE = 0.1
"""Share of all codes that rows may reach; beyond it, computing all codes is faster."""


@register_gate("dselect")
class DSelectKGate(TrainableGate):
    r"""k selectors, each a binary code of an expert with smooth bits, mixed by a softmax.

    .. math:: g(x)_i = \mathrm{scale} \cdot \sum_{j=1}^k \mathrm{softmax}(Wx + w)_j \, p_{ji}, \qquad
        p_{ji} = \prod_{b: \, i_b = 1} h(z_{jb}) \prod_{b: \, i_b = 0} (1 - h(z_{jb}))

    i_b is bit b of i. z = Zx + z₀ are m = ceil(log2 n) logits per selector, most significant bit first; h is
    the smooth-step of width ``gamma``. If n is no power of 2, the codes from n on reach no expert, and their
    mass is missing from the row. ``reachability`` makes it part of the loss.

    A hard bit has a derivative of exactly 0. Training on the CPU therefore lists only the codes that rows
    reach, from 256 experts on: 2 to the number of their soft bits. It makes no tensor of size (B, n). All
    bits are soft at the start, whatever ``gamma`` is.

    In training the auxiliary loss is the batch mean of ``entropy`` · Σ_ji -p_ji log(p_ji + 1e-6) plus
    ``reachability`` · Σ_j 1 / (1e-6 + Σ_i p_ji).

    Args:
        in_features: p.
        num_experts: n.
        k: number of selectors, and the most experts per sample once they are one-hot.
        gamma: width γ of the smooth step: a logit outside ±γ/2 is a hard choice.
        entropy: weight of the entropy loss, which makes selectors one-hot.
        reachability: weight of the loss on binary codes that belong to no expert, if n is no power of 2.
        scale: factor on the weights.

    Attributes:
        selector_weight, selector_bias: (k, m, p), (k, m).
        mixing_weight, mixing_bias: (k, p), (k,).

    Example:
        >>> import torch
        >>> from comet_moe.gates import DSelectKGate
        >>> gate = DSelectKGate(in_features=32, num_experts=8, k=2, entropy=0.1)
        >>> routing = gate(torch.randn(4, 32))
        >>> routing.weights.shape, routing.selectors.shape
        (torch.Size([4, 8]), torch.Size([4, 2, 8]))
        >>> routing.aux_loss.backward()
    """

    k: int
    has_logits = False
    has_trees = True

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        k: Size = 1,
        gamma: Positive = 1.0,
        entropy: NotNegative = 0.0,
        reachability: NotNegative = 0.0,
        scale: Positive = 1.0,
    ):
        super().__init__(in_features, num_experts)
        self.k = checks.at_least_one("k", k)
        self.gamma = checks.positive("gamma", gamma)
        self.entropy = checks.not_negative("entropy", entropy)
        self.reachability = checks.not_negative("reachability", reachability)
        self.bits = (num_experts - 1).bit_length()  # ceil(log2 n)
        self._set_scale(scale)
        self.sums_to_one &= num_experts == 2**self.bits
        self.selector_weight = nn.Parameter(torch.empty(k, self.bits, in_features))
        self.selector_bias = nn.Parameter(torch.empty(k, self.bits))
        self.mixing_weight = nn.Parameter(torch.empty(k, in_features))
        self.mixing_bias = nn.Parameter(torch.empty(k))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Selectors Uniform(±γ/100), mixing Uniform(±0.05)."""
        for selector in (self.selector_weight, self.selector_bias):
            nn.init.uniform_(selector, -self.gamma / 100, self.gamma / 100)
        for mixing in (self.mixing_weight, self.mixing_bias):
            nn.init.uniform_(mixing, -0.05, 0.05)

    def flops(self) -> int:
        """Operations on one row: the bits and the mixing logit of each selector."""
        return 2 * self.in_features * self.k * (self.bits + 1)

    def idle_parameters(self) -> set[str]:
        """All parameters if there is one expert; those of the mixing if there is one selector."""
        if self.num_experts == 1:
            return {name for name, _ in self.named_parameters()}
        return {"mixing_weight", "mixing_bias"} if self.k == 1 else set()

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Bits, products of bits, and their mixture; in evaluation, the code of hard bits is the expert."""
        bits, mixing = self._logits(x)
        if not (self.training or self.keeps_contributions or torch.is_grad_enabled()):
            # Only where reading a value does not make an accelerator wait.
            is_readable = bits.is_cpu and checks.is_plain_eager(bits)
            if is_readable and bool((bits.abs() >= self.gamma / 2).all()):
                return self._route_hard(bits, mixing)
        if self._reaches_few_codes(bits):
            return self._route_by_codes(bits, mixing, mask)
        chosen, refused = smooth_step_sides(bits, self.gamma)
        codes = x.new_ones(*x.shape[:-1], self.k, 1)
        for bit in range(self.bits):
            sides = torch.stack((refused[..., bit], chosen[..., bit]), -1)
            codes = (codes.unsqueeze(-1) * sides.unsqueeze(-2)).flatten(-2)
        selectors = codes[..., : self.num_experts]
        contributions = self._scaled(mixing.softmax(-1)).unsqueeze(-1) * selectors
        weights = contributions.sum(-2)
        aux_loss = None
        if self.training:
            aux_loss = self._aux_loss(selector_entropy(selectors), selectors.sum(-1), mask)
        return Routing(weights=weights, aux_loss=aux_loss, selectors=selectors, contributions=contributions)

    def _reaches_few_codes(self, bits: Tensor) -> bool:
        """Whether rows reach so few codes that only these are to be computed."""
        if self.num_experts < CODES_EXPERTS or self.keeps_contributions:
            return False
        if not (bits.is_cpu and checks.is_plain_eager(bits)):
            return False
        is_soft = ~(bits.detach().abs() >= self.gamma / 2)  # so is NaN
        reached = (2.0 ** is_soft.sum(-1)).sum()
        return bool(reached <= CODES_SHARE * 2**self.bits * bits.shape[:-1].numel())

    def _route_by_codes(self, bits: Tensor, mixing: Tensor, mask: Tensor | None) -> Routing:
        """The routing from the codes that rows reach: bit after bit, an entry takes the sides it can take."""
        chosen, refused = (side.flatten(0, -2) for side in smooth_step_sides(bits, self.gamma))
        source = torch.arange(len(chosen), device=bits.device)  # row · k + selector
        code, path = torch.zeros_like(source), chosen.new_ones(len(source))
        for bit in range(self.bits):
            both = torch.stack((refused[:, bit], chosen[:, bit]), 1).index_select(0, source).flatten()
            taken = both.detach().nonzero().squeeze(1)
            entry, side = taken // 2, taken % 2
            path = path.index_select(0, entry) * both.index_select(0, taken)
            code, source = 2 * code[entry] + side, source[entry]
        if self.num_experts < 2**self.bits:
            valid = (code < self.num_experts).nonzero().squeeze(1)
            code, source, path = code[valid], source[valid], path.index_select(0, valid)
        contribution = self._scaled(mixing.softmax(-1)).flatten().index_select(0, source) * path
        leaves = TreePairs(source // self.k, source % self.k, code, path, contribution, self.k)
        aux_loss = None
        if self.training:
            batch_shape = mixing.shape[:-1]
            mass = path.new_zeros(mixing.numel()).index_add(0, source, path).view(mixing.shape)
            entropy = leaves.entropy(batch_shape.numel()).view(batch_shape)
            aux_loss = self._aux_loss(entropy, mass, mask)
        return Routing.from_trees(leaves, mixing.shape[:-1], self.num_experts, aux_loss)

    def _route_hard(self, bits: Tensor, mixing: Tensor) -> Routing:
        """The routing where every bit is hard, as one slot per selector: no tensor of size (B, n)."""
        values = 2 ** torch.arange(self.bits - 1, -1, -1, device=bits.device)
        expert = ((bits > 0) * values).sum(-1).reshape(-1, self.k)
        weight = self._scaled(mixing.softmax(-1)).reshape(-1, self.k)
        for later in range(1, self.k):  # selectors of the same expert share one slot
            same = expert[:, :later] == expert[:, later : later + 1]
            first = same & (same.cumsum(-1) == 1)
            weight[:, :later] += first * weight[:, later : later + 1]
            weight[:, later].masked_fill_(same.any(-1), 0.0)
        weight.masked_fill_(expert >= self.num_experts, 0.0)
        expert = expert.clamp_max(self.num_experts - 1)
        return Routing.from_slots(expert, weight, mixing.shape[:-1], self.num_experts)

    def _logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Bit logits (B, ..., k, m) and mixing logits (B, ..., k), from one matrix product."""
        weight = torch.cat((self.selector_weight.flatten(0, 1), self.mixing_weight))
        bias = torch.cat((self.selector_bias.flatten(), self.mixing_bias))
        logits = F.linear(x, weight.to(x.dtype), bias.to(x.dtype))
        count = self.k * self.bits
        return logits[..., :count].unflatten(-1, (self.k, self.bits)), logits[..., count:]

    def _aux_loss(self, entropy: Tensor, mass: Tensor, mask: Tensor | None) -> Tensor:
        """From the entropy of the selectors (B, ...) and their mass on experts (B, ..., k)."""
        rows = self.entropy * entropy + self.reachability * (1 / (1e-6 + mass)).sum(-1)
        return masked_mean(rows, mask, self.ranks)

    def extra_repr(self) -> str:
        """Shown in ``repr(gate)``."""
        losses = f"entropy={self.entropy:g}, reachability={self.reachability:g}"
        return f"{super().extra_repr()}, gamma={self.gamma:g}, {losses}"
