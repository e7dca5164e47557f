"""Permutation-based local search around any gate: Sinkhorn, then a hard assignment."""

from comet_moe.local_search.permutation import Permutation, parameter_groups
from comet_moe.local_search.permuted_gate import PermutedGate
from comet_moe.local_search.sinkhorn import assignment, permutation_entropy

__all__ = [
    "Permutation",
    "PermutedGate",
    "assignment",
    "parameter_groups",
    "permutation_entropy",
]
