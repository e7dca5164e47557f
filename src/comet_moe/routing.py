"""What a gate decided for a batch.

Shapes: B samples (or any leading shape (B, ...) such as tokens), n experts, k trees or selectors,
M pairs (sample, expert) of nonzero weight.
"""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

SELECTED_WEIGHT = 1e-5
"""An expert counts as selected, and a tree as one-hot, up to this weight (the paper's n/s)."""


class Pairs(NamedTuple):
    """The nonzero entries of a routing, ordered by sample: flattened rows, experts, weights, each (M,)."""

    sample: Tensor
    expert: Tensor
    weight: Tensor


class Routing:
    """Weights over experts for a batch, with what belongs to them.

    A routing is made from ``weights`` (B, ..., n), from pairs with :meth:`from_pairs`, or from a few slots a
    row with :meth:`from_slots`; whichever form is missing is made when first asked for.

    Attributes:
        selectors: (B, ..., k, n) tree or selector distributions before any permutation, or None.
        contributions: (B, ..., k, n) what each tree or selector adds to the weights before any permutation,
            or None. Sums to the weights over k.
        mask: (B, ...) bool, False where a row is padding, or None.
        execution: "dense" or "sparse", as the mixture ran it; None before it did.
        expert_rows: evaluations of an expert on a row that the mixture ran for this batch, all its gates
            together; None before it did.
        gate_flops: floating-point operations of the gate's matrix products for this batch, where they depend
            on the data; None where ``Gate.flops`` says it all.
    """

    def __init__(
        self,
        *,
        weights: Tensor | None = None,
        aux_loss: Tensor | None = None,
        logits: Tensor | None = None,
        selectors: Tensor | None = None,
        contributions: Tensor | None = None,
        mask: Tensor | None = None,
        pairs: Pairs | None = None,
        slots: tuple[Tensor, Tensor] | None = None,
        batch_shape: torch.Size | None = None,
        num_experts: int = 0,
    ):
        if weights is not None:
            batch_shape, num_experts = weights.shape[:-1], weights.shape[-1]
        assert batch_shape is not None
        self._weights = weights
        self._aux_loss = aux_loss
        self._pairs = pairs
        self._slots = slots
        self.batch_shape = batch_shape
        self.num_experts = num_experts
        self.logits = logits
        self.selectors = selectors
        self.contributions = contributions
        self.mask = mask
        self.execution: str | None = None
        self.expert_rows: int | None = None
        self.gate_flops: int | None = None

    @classmethod
    def from_pairs(cls, pairs: Pairs, batch_shape: torch.Size, num_experts: int) -> "Routing":
        """From unique pairs, ordered by sample."""
        return cls(pairs=pairs, batch_shape=batch_shape, num_experts=num_experts)

    @classmethod
    def from_slots(
        cls, expert: Tensor, weight: Tensor, batch_shape: torch.Size, num_experts: int
    ) -> "Routing":
        """From c slots a row, (rows, c) each: no expert twice in a row, weight 0 where unused."""
        return cls(slots=(expert, weight), batch_shape=batch_shape, num_experts=num_experts)

    @property
    def aux_loss(self) -> Tensor:
        """Scalar, already scaled, to add to the training loss; 0 in eval mode."""
        if self._aux_loss is None:
            held = (self._weights, self._pairs and self._pairs.weight, self._slots and self._slots[1])
            self._aux_loss = next(tensor for tensor in held if tensor is not None).new_zeros(())
        return self._aux_loss

    @property
    def weights(self) -> Tensor:
        """(B, ..., n) on the simplex, exact zeros where an expert is not selected."""
        if self._weights is None:
            rows = prod(self.batch_shape)
            if self._slots is not None:
                expert, weight = self._slots
                flat = weight.new_zeros(rows, self.num_experts).scatter_add(1, expert, weight)
            else:
                sample, expert, weight = self.pairs()
                flat = weight.new_zeros(rows, self.num_experts).index_put((sample, expert), weight)
            self._weights = flat.reshape(*self.batch_shape, self.num_experts)
        return self._weights

    @property
    def in_pairs(self) -> bool:
        """Whether the pairs are at hand without a pass over (B, n)."""
        return self._weights is None

    def pairs(self) -> Pairs:
        """The nonzero entries, ordered by sample; ``sample`` indexes flattened rows."""
        if self._pairs is None:
            if self._slots is not None:
                expert, weight = self._slots
                sample, slot = weight.nonzero(as_tuple=True)
                self._pairs = Pairs(sample, expert[sample, slot], weight[sample, slot])
            else:
                flat = self.weights.reshape(-1, self.num_experts)
                sample, expert = flat.nonzero(as_tuple=True)
                self._pairs = Pairs(sample, expert, flat[sample, expert])
        return self._pairs

    def masked(self, mask: Tensor | None) -> "Routing":
        """This routing with padding sent to no expert."""
        if mask is None or self.mask is mask:
            return self
        if self._weights is not None:
            return self._with(weights=self._weights.masked_fill(~mask.unsqueeze(-1), 0.0), mask=mask)
        keep = mask.flatten()
        if self._slots is not None:
            expert, weight = self._slots
            return self._with(slots=(expert, weight.masked_fill(~keep.unsqueeze(-1), 0.0)), mask=mask)
        sample, expert, weight = self.pairs()
        kept = keep[sample]
        return self._with(pairs=Pairs(sample[kept], expert[kept], weight[kept]), mask=mask)

    def renumbered(self, order: Tensor) -> "Routing":
        """This routing with expert ``order[i]`` (n,) in the slot of expert i."""
        if self._weights is not None:
            return self._with(weights=self._weights.index_select(-1, order.argsort()), contributions=None)
        if self._slots is not None:
            return self._with(slots=(order[self._slots[0]], self._slots[1]))
        sample, expert, weight = self.pairs()
        return self._with(pairs=Pairs(sample, order[expert], weight))

    def _with(self, **changed: Any) -> "Routing":
        """A copy in which one form of the weights is ``changed``, and with it the others dropped."""
        kept = {
            "aux_loss": self._aux_loss,
            "logits": self.logits,
            "selectors": self.selectors,
            "contributions": self.contributions,
            "mask": self.mask,
            "batch_shape": self.batch_shape,
            "num_experts": self.num_experts,
        }
        routing = Routing(**{**kept, **changed})
        routing.gate_flops = self.gate_flops
        return routing

    @torch.no_grad()
    def statistics(self) -> dict[str, Any]:
        """Plain numbers and lists about this batch; padding is not counted.

        ``experts_per_sample``, ``share_of_samples`` and ``share_of_weight`` (n values each),
        ``dead_experts`` (indices that no sample selected), ``tree_entropy`` (mean over samples and trees,
        in nats), ``one_hot_trees`` (share) and ``leaf_share`` (k lists of n, the mean distribution of each
        tree), all three None for a gate without trees or selectors, ``samples`` and ``execution``.
        """
        _, expert, weight = self.pairs()
        expert, weight = expert[weight > SELECTED_WEIGHT], weight[weight > SELECTED_WEIGHT]
        samples = prod(self.batch_shape) if self.mask is None else int(self.mask.sum())
        counts = torch.bincount(expert, minlength=self.num_experts)
        mass = torch.bincount(expert, weights=weight.double(), minlength=self.num_experts)
        return {
            "samples": samples,
            "experts_per_sample": float(counts.sum()) / max(samples, 1),
            "share_of_samples": (counts.double() / max(samples, 1)).tolist(),
            "share_of_weight": (mass / mass.sum().clamp_min(1e-30)).tolist(),
            "dead_experts": (counts == 0).nonzero().flatten().tolist(),
            **self._tree_state(),
            "execution": self.execution,
        }

    def _tree_state(self) -> dict[str, Any]:
        if self.selectors is None:
            return {"tree_entropy": None, "one_hot_trees": None, "leaf_share": None}
        k, n = self.selectors.shape[-2:]
        trees = (self.selectors if self.mask is None else self.selectors[self.mask]).reshape(-1, k, n)
        if len(trees) == 0:
            return {"tree_entropy": 0.0, "one_hot_trees": 1.0, "leaf_share": [[0.0] * n] * k}
        return {
            "tree_entropy": float(torch.special.entr(trees).sum(-1).mean()),
            "one_hot_trees": float((trees.amax(-1) > 1 - SELECTED_WEIGHT).float().mean()),
            "leaf_share": trees.double().mean(0).tolist(),
        }
