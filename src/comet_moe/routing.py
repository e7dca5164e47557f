"""The decision of a gate for a batch.

Shapes: B samples, n experts, k trees or selectors, M pairs (sample, expert) of nonzero weight. Tokens have a
leading shape (B, ...).
"""

from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from comet_moe.checks import should_check_values
from comet_moe.statistics import RoutingStatistics


class Pairs(NamedTuple):
    """The nonzero entries of a routing, ordered by sample: flattened rows, experts, weights, each (M,)."""

    sample: Tensor
    expert: Tensor
    weight: Tensor


class TreePairs(NamedTuple):
    """The leaves that rows reach in k trees, in any order; all other leaves have probability 0.

    Attributes:
        sample, tree, expert: (L,) int64, flattened rows, trees and their leaves.
        probability: (L,) of the leaf in its tree.
        contribution: (L,) what the leaf adds to the weights; None if it is not known.
        trees: k.
    """

    sample: Tensor
    tree: Tensor
    expert: Tensor
    probability: Tensor
    contribution: Tensor | None
    trees: int

    def entropy(self, rows: int) -> Tensor:
        """Σ_j Σ_i -v log(v + 1e-6) of each row, (rows,)."""
        entropy = entropy_terms(self.probability)
        return entropy.new_zeros(rows).index_add(0, self.sample, entropy)

    def scatter(self, values: Tensor, batch_shape: torch.Size, num_experts: int) -> Tensor:
        """``values`` (L,) as a tensor (B, ..., k, n)."""
        dense = values.new_zeros(prod(batch_shape), self.trees, num_experts)
        dense = dense.index_put((self.sample, self.tree, self.expert), values)
        return dense.reshape(*batch_shape, self.trees, num_experts)

    def to_pairs(self, num_experts: int) -> Pairs:
        """The pairs of nonzero weight, ordered by sample."""
        assert self.contribution is not None
        key, pair = (self.sample * num_experts + self.expert).unique(return_inverse=True)
        weight = self.contribution.new_zeros(len(key)).index_add(0, pair, self.contribution)
        if not bool(weight.detach().all()):  # an exponential that was rounded to 0
            used = weight.detach() != 0
            key, weight = key[used], weight[used]
        return Pairs(key // num_experts, key % num_experts, weight)


def entropy_terms(probability: Tensor) -> Tensor:
    """-v log(v + 1e-6), whose gradient is finite at 0."""
    return -(probability * (probability + 1e-6).log())


class Routing:
    """The weights of the experts for each row of a batch, the auxiliary loss, and what the gate computed.

    A routing is built from ``weights`` (B, ..., n), from pairs with :meth:`from_pairs`, or from a few slots
    per row with :meth:`from_slots`. It computes the other forms when they are first read.

    Args:
        weights: (B, ..., n).
        aux_loss: scalar; None means 0.
        logits, selectors, contributions, mask: see the attributes.
        pairs, slots, batch_shape, num_experts, is_ordered: see :meth:`from_pairs` and :meth:`from_slots`.
        tree_pairs: see the attributes.

    Attributes:
        logits: (B, ..., n) router logits, or None for a gate that has none.
        selectors: (B, ..., k, n) tree or selector distributions before any permutation, or None.
        contributions: (B, ..., k, n) what each tree or selector adds to the weights, or None. Their sum over
            k is the weights. Renumbering the experts drops them.
        tree_pairs: the leaves behind ``pairs``, or None. ``selectors`` and ``contributions`` are then
            computed from them when they are read.
        mask: (B, ...) bool, False where a row is padding, or None.
        candidates: (c,) indices of the experts that the gate chooses among; None for all n. All other experts
            have weight 0.
        execution: "dense" or "sparse", how the mixture ran the experts; None before it has run.
        expert_rows: number of (row, expert) pairs that the mixture evaluated for this batch, over all gates.
            It is a scalar tensor on an accelerator and in a graph, and None before the mixture has run.
        most_experts: upper bound on the number of experts per row, for any values; None if unknown.
        gate_flops: floating-point operations of the gate's matrix products for this batch if they depend on
            the data, else None; see ``Gate.flops``.

    Example:
        >>> import torch
        >>> from comet_moe import Routing
        >>> routing = Routing(weights=torch.tensor([[0.25, 0.0, 0.75], [1.0, 0.0, 0.0]]))
        >>> routing.pairs().expert
        tensor([0, 2, 0])
        >>> routing.top(2)
        (tensor([[0.7500, 0.2500],
                [1.0000, 0.0000]]), tensor([[2, 0],
                [0, 1]]))
        >>> routing.statistics()["experts_per_sample"]
        1.5
    """

    candidates: Tensor | None = None
    execution: str | None = None
    expert_rows: int | Tensor | None = None
    gate_flops: int | None = None
    _is_masked = False
    """Whether :meth:`masked` has set the weights of padding to 0; having a ``mask`` does not imply it."""

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
        is_ordered: bool = False,
        tree_pairs: TreePairs | None = None,
    ):
        if (weights is None) + (pairs is None) + (slots is None) != 2:
            raise ValueError("a Routing needs exactly one of weights (B, ..., n), pairs and slots")
        if weights is not None:
            shape = weights.shape
            if len(shape) < 2:
                raise ValueError(f"weights must have shape (B, ..., n), got {tuple(shape)}")
            batch_shape, num_experts = shape[:-1], shape[-1]
        elif batch_shape is None or num_experts < 1:
            raise ValueError(
                "a Routing from pairs or slots needs batch_shape and num_experts of at least 1, got "
                f"batch_shape={batch_shape} and num_experts={num_experts}"
            )
        elif slots is not None:
            shape = slots[0].shape
            if shape != slots[1].shape or len(shape) != 2 or shape[0] != prod(batch_shape):
                raise ValueError(
                    f"slots must be experts and weights of shape ({prod(batch_shape)}, slots per row) each, "
                    f"got {tuple(shape)} and {tuple(slots[1].shape)}"
                )
        elif pairs is not None:
            _check_pairs(*pairs)
            pairs = pairs if is_ordered else _in_order(pairs, num_experts)
        self._weights = weights
        self._aux_loss = aux_loss
        self._pairs = pairs
        self._slots = slots
        self.batch_shape = batch_shape
        self.num_experts = num_experts
        self.logits = logits
        self.tree_pairs = tree_pairs
        self._selectors = selectors
        self._contributions = contributions
        self.mask = mask
        self.most_experts: int | None = None if slots is None else slots[0].shape[1]
        if logits is not None or selectors is not None or contributions is not None or mask is not None:
            self._check_shapes()

    def _check_shapes(self) -> None:
        batch_shape, n = tuple(self.batch_shape), self.num_experts
        for name, tensor, wanted in (
            ("logits", self.logits, (*batch_shape, n)),
            ("mask", self.mask, batch_shape),
        ):
            if tensor is not None and tensor.shape != wanted:
                raise ValueError(f"{name} must have shape {wanted} as the weights, got {tuple(tensor.shape)}")
        for name, tensor in (("selectors", self._selectors), ("contributions", self._contributions)):
            if tensor is None:
                continue
            shape = tensor.shape
            if len(shape) != len(batch_shape) + 2 or (*shape[:-2], shape[-1]) != (*batch_shape, n):
                wanted_text = ", ".join(str(size) for size in (*batch_shape, "k", n))
                raise ValueError(
                    f"{name} must have shape ({wanted_text}) as the weights, got {tuple(tensor.shape)}"
                )

    @classmethod
    def from_pairs(
        cls, pairs: Pairs, batch_shape: torch.Size, num_experts: int, is_ordered: bool = False
    ) -> "Routing":
        """From unique pairs (sample, expert, weight), (M,) each; sorted by sample unless they are ordered."""
        return cls(pairs=pairs, batch_shape=batch_shape, num_experts=num_experts, is_ordered=is_ordered)

    @classmethod
    def from_slots(
        cls, expert: Tensor, weight: Tensor, batch_shape: torch.Size, num_experts: int
    ) -> "Routing":
        """From c slots per row, (rows, c) each: no expert twice in a row, weight 0 where a slot is unused."""
        return cls(slots=(expert, weight), batch_shape=batch_shape, num_experts=num_experts)

    @classmethod
    def from_trees(
        cls, leaves: TreePairs, batch_shape: torch.Size, num_experts: int, aux_loss: Tensor | None = None
    ) -> "Routing":
        """From the leaves that rows reach, with their contributions; no tensor of size (B, n)."""
        return cls(
            pairs=leaves.to_pairs(num_experts),
            tree_pairs=leaves,
            aux_loss=aux_loss,
            batch_shape=batch_shape,
            num_experts=num_experts,
            is_ordered=True,
        )

    @property
    def selectors(self) -> Tensor | None:
        """See the attributes of the class."""
        leaves = self.tree_pairs
        if self._selectors is None and leaves is not None:
            selectors = leaves.scatter(leaves.probability, self.batch_shape, self.num_experts)
            if not _keeps_graph(leaves.probability):
                return selectors
            self._selectors = selectors
        return self._selectors

    @selectors.setter
    def selectors(self, selectors: Tensor | None) -> None:
        self._selectors = selectors

    @property
    def contributions(self) -> Tensor | None:
        """See the attributes of the class."""
        leaves = self.tree_pairs
        if self._contributions is None and leaves is not None and leaves.contribution is not None:
            contributions = leaves.scatter(leaves.contribution, self.batch_shape, self.num_experts)
            if not _keeps_graph(leaves.contribution):
                return contributions
            self._contributions = contributions
        return self._contributions

    @contributions.setter
    def contributions(self, contributions: Tensor | None) -> None:
        self._contributions = contributions

    @property
    def aux_loss(self) -> Tensor:
        """Scalar, already scaled, to add to the training loss; 0 in eval mode."""
        if self._aux_loss is None:
            self._aux_loss = self.stored_weights.new_zeros(())
        return self._aux_loss

    @property
    def stored_weights(self) -> Tensor:
        """The weights in the form that the routing already holds: (B, ..., n), of pairs (M,), or of slots."""
        if self._weights is not None:
            return self._weights
        return self.pairs().weight if self._slots is None else self._slots[1]

    @property
    def weights(self) -> Tensor:
        """(B, ..., n), at least 0, and exactly 0 where an expert is not selected.

        Rows sum to 1 only where :attr:`comet_moe.gates.Gate.sums_to_one` says so and they are not padding.
        """
        if self._weights is not None:
            return self._weights
        rows = prod(self.batch_shape)
        if self._slots is not None:
            expert, weight = self._slots
            flat = weight.new_zeros(rows, self.num_experts).scatter_add(1, expert, weight)
        else:
            sample, expert, weight = self.pairs()
            flat = weight.new_zeros(rows, self.num_experts).index_put((sample, expert), weight)
        weights = flat.reshape(*self.batch_shape, self.num_experts)
        if _keeps_graph(weight):
            self._weights = weights
        return weights

    @property
    def slots(self) -> tuple[Tensor, Tensor] | None:
        """Experts and weights (rows, c) if the routing was made of slots, else None."""
        return self._slots

    @property
    def in_pairs(self) -> bool:
        """Whether no tensor (B, n) was made, so that :meth:`pairs` needs no pass over one."""
        return self._weights is None

    def pairs(self) -> Pairs:
        """The nonzero entries, ordered by sample; ``sample`` indexes flattened rows."""
        if self._pairs is not None:
            return self._pairs
        if self._slots is not None:
            expert, weight = self._slots
            sample, slot = weight.nonzero(as_tuple=True)
            pairs = Pairs(sample, expert[sample, slot], weight[sample, slot])
        else:
            weight = self.weights.reshape(-1, self.num_experts)
            sample, expert = weight.nonzero(as_tuple=True)
            pairs = Pairs(sample, expert, weight[sample, expert])
        if _keeps_graph(weight):
            self._pairs = pairs
        return pairs

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest weights of each row and their experts: (B, ..., k) each, largest first.

        The k experts of a row are distinct. If fewer than k are selected, the others have weight 0. The
        weights carry the gradient.

        Args:
            k: number of experts per row, 1..n.
        """
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= self.num_experts:
            raise ValueError(f"k must be an integer from 1 to {self.num_experts}, got {k!r}")
        if self._weights is not None or k * k > self.num_experts:  # (rows, k, k) would be more than (rows, n)
            weight, expert = self.weights.topk(k, -1)
            return weight, expert
        slot_expert, slot_weight = self._at_least_slots(k)
        weight, slot = slot_weight.topk(k, -1)
        expert = _replace_unused(slot_expert.gather(-1, slot), weight != 0)
        return weight.reshape(*self.batch_shape, k), expert.reshape(*self.batch_shape, k)

    def _at_least_slots(self, k: int) -> tuple[Tensor, Tensor]:
        """Experts and weights in at least k slots per row, from slots or pairs: (rows, c) each, c >= k."""
        if self._slots is not None:
            expert, weight = self._slots
            missing = max(0, k - expert.shape[1])
            return F.pad(expert, (0, missing)), F.pad(weight, (0, missing))
        sample, expert, weight = self.pairs()
        rows = prod(self.batch_shape)
        counts = torch.bincount(sample, minlength=rows)
        slot = torch.arange(len(sample), device=sample.device) - (counts.cumsum(0) - counts)[sample]
        shape = (rows, max(k, int(counts.max()) if rows else 0))
        return (
            expert.new_zeros(shape).index_put((sample, slot), expert),
            weight.new_zeros(shape).index_put((sample, slot), weight),
        )

    def masked(self, mask: Tensor | None) -> "Routing":
        """This routing with weights and contributions of 0 where ``mask`` is False: padding has no expert."""
        if mask is None or (self._is_masked and self.mask is mask):
            return self
        changed: dict[str, Any] = {"mask": mask}
        if self._contributions is not None:
            changed["contributions"] = self._contributions.masked_fill(~mask[..., None, None], 0.0)
        leaves = self.tree_pairs
        if leaves is not None and leaves.contribution is not None:
            kept = mask.flatten()[leaves.sample]
            changed["tree_pairs"] = leaves._replace(contribution=leaves.contribution.masked_fill(~kept, 0.0))
        if self._weights is not None:
            changed["weights"] = self._weights.masked_fill(~mask.unsqueeze(-1), 0.0)
        elif self._slots is not None:
            expert, weight = self._slots
            changed["slots"] = expert, weight.masked_fill(~mask.reshape(-1, 1), 0.0)
        else:
            sample, expert, weight = self.pairs()
            kept = mask.flatten()[sample]
            changed["pairs"] = Pairs(sample[kept], expert[kept], weight[kept])
        routing = self._with(**changed)
        routing._is_masked = True
        return routing

    def renumbered(self, order: Tensor) -> "Routing":
        """This routing with expert order[i] instead of expert i; ``order`` is a permutation (n,)."""
        return self._move(order, self.num_experts, contributions=None)

    def embedded(self, experts: Tensor, num_experts: int) -> "Routing":
        """This routing over some of ``num_experts`` experts: expert i becomes experts[i], all distinct.

        The others have weight 0 and a logit of minus infinity.
        """
        trees: dict[str, Any] = {
            name: None if values is None else _place(values, experts, num_experts)
            for name, values in (("selectors", self._selectors), ("contributions", self._contributions))
        }
        leaves = self.tree_pairs
        if leaves is not None:
            trees["tree_pairs"] = leaves._replace(expert=experts[leaves.expert])
        routing = self._move(experts, num_experts, **trees)
        if routing.candidates is None:
            routing.candidates = experts
        return routing

    def _move(self, target: Tensor, num_experts: int, **changed: Any) -> "Routing":
        """A copy in which expert i, with its logit, is expert target[i] of ``num_experts``."""
        if self.logits is not None:
            changed["logits"] = _place(self.logits, target, num_experts, fill=-inf)
        if self._weights is not None:
            changed["weights"] = _place(self._weights, target, num_experts)
        elif self._slots is not None:
            changed["slots"] = target[self._slots[0]], self._slots[1]
        else:
            sample, expert, weight = self.pairs()
            changed["pairs"] = Pairs(sample, target[expert], weight)
        routing = self._with(num_experts=num_experts, **changed)
        if self.candidates is not None:
            routing.candidates = target[self.candidates]
        return routing

    def section(self, first: int, num_experts: int) -> "Routing":
        """Only the weights of ``num_experts`` experts, starting at ``first`` and renumbered from 0."""
        last = first + num_experts
        if self._weights is not None:
            return Routing(weights=self._weights[..., first:last])
        sample, expert, weight = self.pairs()
        kept = (expert >= first) & (expert < last)
        pairs = Pairs(sample[kept], expert[kept] - first, weight[kept])
        return Routing.from_pairs(pairs, self.batch_shape, num_experts, is_ordered=True)

    def with_weights(
        self, weights: Tensor, contributions: Tensor | None = None, most_experts: int | None = None
    ) -> "Routing":
        """This routing with new weights; padding keeps weight 0.

        Args:
            weights: (B, ..., n).
            contributions: (B, ..., k, n), which sum to ``weights`` over k; None if they are not known.
            most_experts: how many weights of a row are not 0 at most; None if that is not known.
        """
        if self.mask is not None:
            weights = weights.masked_fill(~self.mask.unsqueeze(-1), 0.0)
            if contributions is not None:
                contributions = contributions.masked_fill(~self.mask[..., None, None], 0.0)
        routing = self._with(weights=weights, contributions=contributions)
        routing.most_experts = most_experts
        return routing

    def with_aux_loss(self, aux_loss: Tensor) -> "Routing":
        """This routing with another auxiliary loss."""
        form = "weights" if self._weights is not None else "pairs" if self._slots is None else "slots"
        # No copy.copy: torch.compile cannot trace it in torch 2.10.
        routing = self._with(aux_loss=aux_loss, is_ordered=True, **{form: getattr(self, f"_{form}")})
        routing._pairs, routing._slots = self._pairs, self._slots
        routing.execution, routing.expert_rows = self.execution, self.expert_rows
        return routing

    def _with(self, **changed: Any) -> "Routing":
        """A copy with one form of the weights ``changed``; forms computed from the old one are dropped."""
        kept = {
            "aux_loss": self._aux_loss,
            "logits": self.logits,
            "selectors": self._selectors,
            "contributions": self._contributions,
            "tree_pairs": self.tree_pairs,
            "mask": self.mask,
            "batch_shape": self.batch_shape,
            "num_experts": self.num_experts,
        }
        if "contributions" in changed and "tree_pairs" not in changed and self.tree_pairs is not None:
            kept["tree_pairs"] = self.tree_pairs._replace(contribution=None)
        routing = Routing(**{**kept, **changed})
        routing.gate_flops = self.gate_flops
        routing.most_experts = self.most_experts
        routing.candidates = self.candidates
        routing._is_masked = self._is_masked
        return routing

    def statistics(self) -> dict[str, Any]:
        """Plain numbers and lists about this batch; padding is not counted.

        See :meth:`comet_moe.statistics.RoutingStatistics.result`, which also takes many batches.
        """
        statistics = RoutingStatistics()
        statistics.add(self)
        return statistics.result()


def _keeps_graph(weight: Tensor) -> bool:
    """Whether a tensor computed from ``weight`` now keeps its gradient; not within ``torch.no_grad()``."""
    return torch.is_grad_enabled() or not weight.requires_grad


def _check_pairs(sample: Tensor, expert: Tensor, weight: Tensor) -> None:
    if sample.dim() != 1 or not (sample.shape == expert.shape == weight.shape):
        raise ValueError(
            f"pairs must be samples, experts and weights of shape (M,) each, got {tuple(sample.shape)}, "
            f"{tuple(expert.shape)} and {tuple(weight.shape)}"
        )


def _in_order(pairs: Pairs, num_experts: int) -> Pairs:
    """``pairs`` ordered by sample, as every reader expects; ValueError for one that comes twice."""
    key, order = (pairs.sample * num_experts + pairs.expert).sort(stable=True)
    ordered = Pairs(pairs.sample[order], pairs.expert[order], pairs.weight[order])
    if should_check_values(key) and bool((key[1:] == key[:-1]).any()):
        twice = int((key[1:] == key[:-1]).nonzero()[0])
        raise ValueError(
            f"each pair must come once, and sample {int(ordered.sample[twice])} has expert "
            f"{int(ordered.expert[twice])} twice: add up their weights"
        )
    return ordered


def _place(values: Tensor, target: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """(..., m) -> (..., size): entry i at index target[i], ``fill`` where there is none."""
    return values.new_full((*values.shape[:-1], size), fill).index_copy(-1, target, values)


def _replace_unused(expert: Tensor, is_used: Tensor) -> Tensor:
    """``expert`` (rows, k) with each unused slot set to an expert that the row does not use.

    A row that uses j of its k slots leaves at least k - j of the experts 0..k-1 free.
    """
    k = expert.shape[1]
    candidate = torch.arange(k, device=expert.device)
    is_taken = ((expert.unsqueeze(1) == candidate.unsqueeze(1)) & is_used.unsqueeze(1)).any(-1)  # (rows, k)
    free_first = is_taken.to(torch.uint8).argsort(stable=True)
    nth_unused = (~is_used).cumsum(-1) - 1
    return torch.where(is_used, expert, free_first.gather(-1, nth_unused.clamp_min(0)))
