"""Gates by name, with or without local search."""

from collections.abc import Callable
from typing import Any

from comet_moe.gates import Gate, build_gate
from comet_moe.gates.registry import DENSE_KINDS, find_gate
from comet_moe.local_search.permutation import Permutation
from comet_moe.local_search.permuted_gate import PermutedGate

GateFactory = Callable[[int, int, int], Gate]
"""(in_features, num_experts, k) -> gate."""


def gate_factory(
    name: str, *, vocab_size: int | None = None, search_steps: int = 0, seed: int = 0, **settings: Any
) -> GateFactory:
    """A function (in_features, num_experts, k) -> gate, for ``replace_routers``, ``upcycle`` and ``grow``.

    Args:
        name: of a gate, see :func:`comet_moe.gates.build_gate`; with "+" for local search, one search per
            mixture.
        vocab_size: number of token ids, for gates that route by them; each mixture has a table of its own.
        search_steps: optimiser steps of local search.
        seed: of the first table; each further one has the next seed.
        settings: more arguments of :func:`~comet_moe.gates.build_gate`.

    Example:
        >>> from comet_moe.local_search import gate_factory
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
