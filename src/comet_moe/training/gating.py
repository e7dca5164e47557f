"""Gates from their configuration, with local search where it is asked for."""

from comet_moe.gates import CometGate, DSelectKGate, Gate, HashGate, SoftmaxGate, TopKGate
from comet_moe.local_search import Permutation, PermutedGate
from comet_moe.recipes.schema import (
    CometConfig,
    Config,
    DSelectKConfig,
    GateConfig,
    HashConfig,
    TopKConfig,
)


def build_gates(config: Config, in_features: int, tasks: int, num_keys: int | None, steps: int) -> list[Gate]:
    """One gate a task, as ``config.gate`` says.

    Args:
        config: of the run.
        in_features: p, what the gates read.
        tasks: number of gates.
        num_keys: size of the hash table, None where the data has no keys.
        steps: optimiser steps of an epoch, for the length of the search.
    """
    n = config.model.experts
    gates = [
        build_gate(config.gate, in_features, n, num_keys, seed=config.seed + task) for task in range(tasks)
    ]
    if not config.searches:
        return gates
    search = config.search

    def permutation(trees: int | None = None) -> Permutation:
        return Permutation(
            n,
            steps=search.epochs * steps,
            zeta=search.zeta,
            tau=search.tau,
            iterations=search.iterations,
            trees=trees,
            gumbel=search.gumbel,
            lr_factor=search.lr_factor,
        )

    if search.shared == "tree" and not isinstance(config.gate, CometConfig | DSelectKConfig):
        raise ValueError(
            f"search.shared is tree, but the gate {config.gate.name} has no trees: choose all or gate"
        )
    if search.shared == "all":
        one = permutation()
        return [PermutedGate(gate, one) for gate in gates]
    return [PermutedGate(gate, permutation(gate.k if search.shared == "tree" else None)) for gate in gates]


def build_gate(gate: GateConfig, in_features: int, num_experts: int, num_keys: int | None, seed: int) -> Gate:
    """The gate that ``gate`` describes, without local search."""
    if isinstance(gate, CometConfig):
        return CometGate(in_features, num_experts, gate.k, gate.gamma, gate.entropy)
    if isinstance(gate, DSelectKConfig):
        return DSelectKGate(in_features, num_experts, gate.k, gate.gamma, gate.entropy, gate.reachability)
    if isinstance(gate, TopKConfig):
        return TopKGate(in_features, num_experts, gate.k, gate.noise, gate.normalize)
    if isinstance(gate, HashConfig):
        if num_keys is None:
            raise ValueError(
                "a hash gate needs keys such as users, and this data set has none: choose another gate"
            )
        return HashGate(num_keys, num_experts, seed)
    return SoftmaxGate(in_features, num_experts)
