"""Expert choice (Zhou et al. 2022): experts choose rows, so that every expert has the same load."""

from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comet_moe import checks
from comet_moe.gates.base import LinearGate, SteppedGate
from comet_moe.gates.ranks import sum_over_ranks
from comet_moe.routing import Routing

MOMENTUM = 0.1
"""Weight of a batch in the running mean, once there were ten."""


class ExpertChoiceGate(LinearGate, SteppedGate):
    r"""Probabilities softmax(Wx + b) over experts; each expert takes the rows where its own is largest.

    .. math:: g(x_b)_i = \mathrm{scale} \cdot P_{bi} \; (b \in T_i), \quad g(x_b)_i = 0 \; (b \notin T_i),
        \qquad |T_i| = \lceil \frac{\mathrm{capacity} \cdot B}{n} \rceil

    A batch has B rows that are not padding. In training an expert takes its ceil(capacity · B / n) best ones,
    at most B (Zhou et al. 2022). With ``scale=1`` the weights are the probabilities of the chosen pairs. So
    the load is perfectly balanced without any loss; a row has ``capacity`` experts on average, some rows have
    none and some have many. Of two rows with the same probability the earlier one is taken.

    What a row gets depends on the other rows of its batch (``depends_on_batch``), which evaluation must not
    do. There an expert takes every row whose probability reaches its ``threshold``. That is the running mean,
    over training batches, of the lowest probability that it accepted. So a row is routed on its own, and
    loads are balanced only as far as the data is like the training data.

    Use it where load balance matters most, as in encoders and vision models. It is not for language models
    that predict the next token: in training the choice of a token sees later ones. Under
    ``torch.distributed`` each rank chooses among its own rows, or where ``ranks`` is set among those of all,
    and :func:`comet_moe.step` averages the thresholds.

    Args:
        in_features: p.
        num_experts: n.
        capacity: experts per row on average.
        scale: factor on the weights.

    Attributes:
        weight, bias: (n, p), (n,), Glorot-uniform and zero at the start.
        threshold: (n,) buffer, 1 / n before the first training batch.
        batches_seen: scalar buffer, training batches in ``threshold``.

    Example:
        >>> import torch
        >>> from comet_moe.gates import ExpertChoiceGate
        >>> gate = ExpertChoiceGate(in_features=32, num_experts=8, capacity=2.0)
        >>> gate(torch.randn(12, 32)).weights.count_nonzero(0)
        tensor([3, 3, 3, 3, 3, 3, 3, 3])
    """

    depends_on_batch = True
    moves_in_training = True
    threshold: Tensor
    batches_seen: Tensor

    def __init__(self, in_features: int, num_experts: int, capacity: float = 2.0, scale: float = 1.0):
        super().__init__(in_features, num_experts)
        self._set_scale(scale)
        self.sums_to_one = False
        self.capacity = checks.positive("capacity", capacity)
        self.register_buffer("threshold", torch.empty(num_experts))
        self.register_buffer("batches_seen", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot-uniform weight, zero bias, thresholds of 1 / n."""
        super().reset_parameters()
        nn.init.constant_(self.threshold, 1 / self.num_experts)
        nn.init.zeros_(self.batches_seen)

    def idle_parameters(self) -> set[str]:
        """All parameters if there is one expert."""
        return {"weight", "bias"} if self.num_experts == 1 else set()

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """One linear map and a softmax; in training the best rows of each expert, else those it accepts."""
        logits = self._logits(x)
        probability = logits.softmax(-1)
        if self.training:
            chosen = self._choose_rows(probability.detach(), mask)
        else:
            chosen = probability >= self.threshold.to(probability.dtype)
        return Routing(weights=self._scaled(probability.masked_fill(~chosen, 0.0)), logits=logits)

    @torch.no_grad()
    def step(self) -> None:
        """Average the thresholds over the ranks, so that all evaluate alike."""
        if dist.is_available() and dist.is_initialized():
            self.threshold.copy_(sum_over_ranks(self.threshold) / dist.get_world_size())

    def extra_repr(self) -> str:
        """Shown in ``repr(gate)``."""
        return f"{super().extra_repr()}, capacity={self.capacity:g}"

    def _choose_rows(self, probability: Tensor, mask: Tensor | None) -> Tensor:
        """Which rows each expert takes, (B, ..., n) bool; moves the threshold."""
        if self.ranks is None:
            chosen = self._choose(probability, mask)
            self._move_threshold(probability, chosen)
            return chosen
        is_row = torch.ones_like(probability[..., :1]) if mask is None else mask.unsqueeze(-1).to(probability)
        rows, own = self.ranks.gather(torch.cat((probability, is_row), -1).flatten(0, -2))
        chosen = self._choose(rows[:, :-1], rows[:, -1] > 0)
        self._move_threshold(rows[:, :-1], chosen)
        return chosen[own].view_as(probability)

    def _choose(self, probability: Tensor, mask: Tensor | None) -> Tensor:
        """(B, ..., n) bool: whether an expert takes a row.

        With padding the number of rows is known to the device only, hence a sort in place of ``topk``.
        """
        flat = probability.flatten(0, -2)
        if mask is not None:
            flat = flat.masked_fill(~mask.reshape(-1, 1), -1.0)  # after all others
        rows = flat.shape[0] if mask is None else mask.sum()
        share = Fraction(self.capacity).limit_denominator(1_000_000) / self.num_experts
        wanted = -(-share.numerator * rows // share.denominator)  # ceil, exact in integers
        order = flat.argsort(dim=0, descending=True, stable=True)
        position = torch.arange(flat.shape[0], device=flat.device).unsqueeze(-1)
        is_taken = ((position < wanted) & (position < rows)).expand_as(order)
        return torch.zeros_like(flat, dtype=torch.bool).scatter(0, order, is_taken).view_as(probability)

    @torch.no_grad()
    def _move_threshold(self, probability: Tensor, chosen: Tensor) -> None:
        """Toward the lowest probability that each expert accepted; an empty batch moves nothing."""
        if probability.numel() == 0:
            return
        lowest = probability.masked_fill(~chosen, torch.inf).flatten(0, -2).amin(0)
        has_rows = chosen.any()
        rate = (1 / (self.batches_seen + 1)).clamp_min(MOMENTUM)
        moved = self.threshold + rate * (lowest.to(self.threshold.dtype) - self.threshold)
        self.threshold.copy_(torch.where(has_rows, moved, self.threshold))
        self.batches_seen.add_(has_rows)
