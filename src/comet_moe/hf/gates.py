"""Gates for the mixtures of a model of transformers: made by name, or with weights that sum to 1."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from comet_moe.gates import Gate, GateWrapper, build_gate
from comet_moe.gates.registry import DENSE_KINDS, find_gate
from comet_moe.local_search import Permutation, PermutedGate
from comet_moe.routing import Routing

GateFactory = Callable[[int, int, int], Gate]
"""(in_features, num_experts, k) -> gate."""


def gate_factory(
    name: str, *, vocab_size: int | None = None, search_steps: int = 0, seed: int = 0, **settings: Any
) -> GateFactory:
    """A function (in_features, num_experts, k) -> gate, for :func:`replace_routers` and :func:`upcycle`.

    Args:
        name: of a gate, see :func:`comet_moe.gates.build_gate`; with "+" for local search, one search per
            mixture.
        vocab_size: number of token ids, for gates that route by them; each mixture has a table of its own.
        search_steps: optimiser steps of local search.
        seed: of the first table; each further one has the next seed.
        settings: more arguments of :func:`~comet_moe.gates.build_gate`.

    Example:
        >>> from comet_moe.hf import gate_factory
        >>> gate_factory("comet", entropy=0.1)(16, 8, 2)
        CometGate(in_features=16, num_experts=8, k=2, gamma=1, entropy=0.1)
    """
    kind = name.removesuffix("+")
    if kind not in DENSE_KINDS and find_gate(kind).needs_keys and vocab_size is None:
        raise ValueError(
            f"a {kind} gate routes by token id: pass vocab_size, or another gate for a model without tokens"
        )
    made = 0

    def factory(in_features: int, num_experts: int, k: int) -> Gate:
        nonlocal made
        gate = build_gate(
            kind, in_features, num_experts, k=k, num_keys=vocab_size, seed=seed + made, **settings
        )
        made += 1
        if name.endswith("+"):
            return PermutedGate(gate, Permutation(num_experts, steps=search_steps))
        return gate

    return factory


class RescaledGate(GateWrapper):
    """w_i = g_i / Σ_j g_j, where no gradient goes through the sum; a row without experts stays 0.

    Copies of one layer compute what that layer did only if their weights sum to 1. A Top-1 gate that trains
    has a weight below 1. Here its weight is 1, with the gradient of log g_i.

    Args:
        gate: a gate with weights of at least 0.

    Example:
        >>> import torch
        >>> from comet_moe.gates import TopKGate
        >>> from comet_moe.hf import RescaledGate
        >>> gate = RescaledGate(TopKGate(in_features=8, num_experts=4, k=1, normalize="all"))
        >>> weights = gate(torch.randn(3, 8)).weights
        >>> weights.sum(-1)
        tensor([1., 1., 1.], grad_fn=<SumBackward1>)
    """

    def __init__(self, gate: Gate):
        super().__init__(gate)
        self.sums_to_one = True

    def forward(self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None) -> Routing:
        """Route ``x`` (B, ..., p) by the gate inside."""
        routing: Routing = self.gate(x, keys=keys, mask=mask)
        total = routing.weights.detach().sum(-1, keepdim=True)
        weights = routing.weights / total.masked_fill(total == 0, 1.0)
        return routing.with_weights(weights, most_experts=routing.most_experts)
