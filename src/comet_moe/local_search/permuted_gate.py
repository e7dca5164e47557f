"""A gate followed by a permutation of the experts; itself a gate."""

from typing import Any

import torch
from torch import Tensor

from comet_moe import checks
from comet_moe.gates import Gate, GateWrapper
from comet_moe.local_search.permutation import Permutation
from comet_moe.routing import Routing


class PermutedGate(GateWrapper):
    """Sends output i of ``gate`` to expert order[i] of ``search``.

    In stage-1 training the weights are g(x) S with the soft matrix S. After a finite number of Sinkhorn
    rounds its rows do not sum to 1, so the weights are rescaled: each row keeps its sum. Each call adds the
    gate's share of the entropy of S to the auxiliary loss. Otherwise the experts are only renumbered.

    Args:
        gate: any gate.
        search: the permutation; may be shared with other gates.

    Example:
        >>> import torch
        >>> from comet_moe import Permutation, PermutedGate
        >>> from comet_moe.gates import TopKGate
        >>> search = Permutation(num_experts=6, steps=1000)
        >>> gates = [PermutedGate(TopKGate(in_features=32, num_experts=6, k=2), search) for _ in range(2)]
        >>> search.num_gates
        2
        >>> gates[0](torch.randn(4, 32)).weights.shape
        torch.Size([4, 6])
    """

    search: Permutation

    def __init__(self, gate: Gate, search: Permutation):
        super().__init__(gate)
        if search.num_experts != gate.num_experts:
            raise ValueError(
                f"the permutation is over {search.num_experts} experts, the gate over {gate.num_experts}: "
                f"make it Permutation(num_experts={gate.num_experts}, ...)"
            )
        if search.trees is not None and search.trees != gate.k:
            raise ValueError(f"the permutation has {search.trees} trees, the gate has k={gate.k}")
        self.search = search
        self.stochastic = gate.stochastic or search.gumbel > 0
        self.keeps_contributions = search.trees is not None
        self.has_trees = False  # its routings are of experts, which a permutation has renumbered

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a new search counts this gate among its gates."""
        if name == "search":
            before = self._modules.get("search")
            if isinstance(before, Permutation):
                before.remove_gate(self)
            value.add_gate(self)
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.search.add_gate(self)  # the search is a copy, too, and has counted none yet

    @property
    def soft_in_training(self) -> bool:  # type: ignore[override]
        """In stage 1 training permutes softly, evaluation does not."""
        return self.gate.soft_in_training or self.search.searching

    def idle_parameters(self) -> set[str]:
        """Idle parameters of the gate, and U if there is one expert or the search is over."""
        idle = super().idle_parameters()
        is_over = self.num_experts == 1 or not self.search.searching
        return idle | {"search.logits"} if is_over else idle

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Route ``x`` (B, ..., p) by the gate, then permute the experts."""
        routing = self.gate(x, keys=keys, mask=mask)
        if self.training and self.search.searching:
            return self._permute_softly(routing)
        return self._renumber(routing)

    def _permute_softly(self, routing: Routing) -> Routing:
        soft, aux_loss = self.search.soft_matrix_and_loss()
        with checks.no_autocast(soft):
            if self.search.trees is None:
                weights = routing.weights
                permuted = weights @ soft.to(weights.dtype)
            else:
                weights = self._contributions(routing).flatten(-2)
                permuted = weights @ soft.to(weights.dtype).flatten(0, 1)
            wanted_sum = weights.sum(-1, keepdim=True)
            row_sum = permuted.sum(-1, keepdim=True)
            permuted = permuted * (wanted_sum / row_sum.masked_fill(row_sum == 0, 1.0))
            logits = None if routing.logits is None else _permute_logits(routing.logits, soft)
        return Routing(
            weights=permuted,
            aux_loss=routing.aux_loss + aux_loss,
            logits=logits,
            selectors=routing.selectors,
            mask=routing.mask,
        )

    def _renumber(self, routing: Routing) -> Routing:
        order = self.search.order()
        if self.search.trees is None:
            return routing.renumbered(order)
        contributions = self._contributions(routing)
        experts = order.flatten().expand(*contributions.shape[:-2], -1)
        weights = torch.zeros_like(routing.weights).scatter_add(-1, experts, contributions.flatten(-2))
        return Routing(
            weights=weights,
            aux_loss=routing.aux_loss,
            logits=routing.logits,
            selectors=routing.selectors,
            mask=routing.mask,
        )

    def _contributions(self, routing: Routing) -> Tensor:
        """(B, ..., k, n) what each tree adds to the weights."""
        if routing.contributions is None:
            raise ValueError(
                f"{type(self.gate).__name__} has no trees to permute separately: use Permutation(trees=None)"
            )
        return routing.contributions


def _permute_logits(logits: Tensor, soft: Tensor) -> Tensor:
    """Logits whose softmax is softmax(logits) S, S the mean over the trees, with the same logsumexp."""
    matrix = soft if soft.dim() == 2 else soft.mean(0)
    probabilities = logits.softmax(-1) @ matrix.to(logits.dtype)
    log_probabilities = probabilities.clamp_min(torch.finfo(logits.dtype).tiny).log().log_softmax(-1)
    return log_probabilities + logits.logsumexp(-1, keepdim=True)
