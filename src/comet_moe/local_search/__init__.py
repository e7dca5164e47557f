"""Permutation-based local search around any gate: Sinkhorn, then a hard assignment."""

from comet_moe.local_search.factory import GateFactory, gate_factory
from comet_moe.local_search.permutation import Permutation
from comet_moe.local_search.permuted_gate import PermutedGate
from comet_moe.local_search.sinkhorn import assignment, permutation_entropy

__all__ = [
    "GateFactory",
    "Permutation",
    "PermutedGate",
    "assignment",
    "gate_factory",
    "permutation_entropy",
]
