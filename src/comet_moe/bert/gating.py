"""The gate of a layer: a gate of the library, by token or by sentence, with load balance and local search.

Shapes: B sentences, T tokens, p features, E experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comet_moe.bert.configuration import CometBertConfig
from comet_moe.gates import CometGate, DSelectKGate, Gate, GateWrapper, HashGate, SoftmaxGate, TopKGate
from comet_moe.gates.top_k import default_normalize
from comet_moe.local_search import Permutation, PermutedGate
from comet_moe.routing import Routing
from comet_moe.statistics import SELECTED_WEIGHT


def build_layer_gate(config: CometBertConfig, layer: int) -> Gate:
    """The gate that ``config`` describes, for ``layer`` (from 0)."""
    gate = _build_gate(config, layer)
    if config.load_balance > 0 and config.kind != "hash":
        gate = BalancedGate(gate, config.load_balance)
    if config.route_by == "sentence":
        gate = SentenceGate(gate)
    if not config.uses_search:
        return gate
    search = Permutation(
        config.num_experts,
        steps=config.search_steps,
        zeta=config.zeta,
        tau=(config.tau[0], config.tau[1]),
        iterations=(config.sinkhorn_iterations[0], config.sinkhorn_iterations[1]),
        gumbel=config.gumbel,
        lr_factor=config.search_lr_factor,
    )
    return PermutedGate(gate, search)


def _build_gate(config: CometBertConfig, layer: int) -> Gate:
    p, n = config.hidden_size, config.num_experts
    if config.kind == "comet":
        return CometGate(p, n, config.k, config.gamma, config.entropy)
    if config.kind == "dselect":
        return DSelectKGate(p, n, config.k, config.gamma, config.entropy, config.reachability)
    if config.kind == "topk":
        normalize: Any = config.normalize or default_normalize(config.k)
        return TopKGate(p, n, config.k, config.noise, normalize)
    if config.kind == "hash":
        return TokenHashGate(config.vocab_size, n, config.hash_seed + layer)
    return SoftmaxGate(p, n)


class TokenHashGate(HashGate):
    """A hash gate over token ids that can draw its table again."""

    def __init__(self, num_keys: int, num_experts: int, seed: int):
        super().__init__(num_keys, num_experts, seed)
        self.seed = seed

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the table from the seed, for transformers, which initialises models after construction."""
        self.assignment.copy_(HashGate(self.num_keys, self.num_experts, self.seed).assignment)


class SentenceGate(GateWrapper):
    """Routes all tokens of a sentence as ``gate`` routes the mean of its unmasked tokens.

    Args:
        gate: any but a hash gate.
    """

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Route ``x`` (B, T, p); ``mask`` (B, T) is False where a token is padding."""
        sentences, tokens = x.shape[:2]
        if mask is None:
            routing = self.gate(x.mean(1))
        else:
            total = (x * mask.unsqueeze(-1)).sum(1)
            routing = self.gate(total / mask.sum(1, keepdim=True).clamp_min(1), mask=mask.any(1))

        def for_each_token(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.unsqueeze(1).expand(-1, tokens, *values.shape[1:])

        token_routing = Routing(
            weights=for_each_token(routing.weights),
            aux_loss=routing.aux_loss,
            logits=for_each_token(routing.logits),
            selectors=for_each_token(routing.selectors),
            contributions=for_each_token(routing.contributions),
        ).masked(mask)
        counted = routing.gate_flops
        token_routing.gate_flops = self.gate.flops() * sentences if counted is None else counted
        return token_routing


class BalancedGate(GateWrapper):
    """``gate`` with the load-balancing loss ``weight``·E·Σ_e P_e f_e, in training.

    P_e is the mean probability of expert e over the rows, f_e its share of the (row, expert) pairs. The
    probabilities are the softmax over all experts for a Top-k gate, and the weights for any other.

    Args:
        gate: a gate with parameters.
        weight: weight of the load-balancing loss.
    """

    def __init__(self, gate: Gate, weight: float):
        super().__init__(gate)
        self.weight = weight

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Route ``x`` as the gate does."""
        routing = self.gate(x, keys=keys, mask=mask)
        if not self.training:
            return routing
        return Routing(
            weights=routing.weights,
            aux_loss=routing.aux_loss + self.weight * self._imbalance(x, routing),
            logits=routing.logits,
            selectors=routing.selectors,
            contributions=routing.contributions,
            mask=routing.mask,
        )

    def _imbalance(self, x: Tensor, routing: Routing) -> Tensor:
        """E·Σ_e P_e f_e: 1 where the load is even, E where one expert has all rows."""
        weights = routing.weights.flatten(0, -2)
        pairs = (weights > SELECTED_WEIGHT).sum(0)
        share = pairs / pairs.sum().clamp_min(1)
        probabilities = self._probabilities(x, routing.weights).flatten(0, -2)
        if routing.mask is not None:
            probabilities = probabilities[routing.mask.flatten()]
        mean = probabilities.sum(0) / max(len(probabilities), 1)
        return self.num_experts * (mean * share).sum()

    def _probabilities(self, x: Tensor, weights: Tensor) -> Tensor:
        if not isinstance(self.gate, TopKGate):
            return weights
        weight, bias = self.gate.weight.to(weights.dtype), self.gate.bias.to(weights.dtype)
        return F.linear(x.to(weights.dtype), weight, bias).softmax(-1)
