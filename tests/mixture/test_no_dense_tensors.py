"""A training step of small experts allocates nothing of the size of rows times experts."""

import pytest
import torch

import comet_moe
from comet_moe import LazyAdam, MoE
from comet_moe.experts import NeuronExperts
from comet_moe.gates import CometGate, DSelectKGate, HashGate, ProductKeyGate

P, ROWS, N = 5, 64, 8192

GATES = {
    "hard trees": lambda: CometGate(P, N, k=2, gamma=1e-3, entropy=0.1, sparse=True),
    "soft trees with a ceiling": lambda: CometGate(P, N, k=2, gamma=9.0, max_paths=4, sparse=True),
    "balanced trees": lambda: CometGate(P, N, k=2, gamma=0.01, balance="median", sparse=True),
    "hard selectors": lambda: DSelectKGate(P, N, k=2, gamma=1e-3, entropy=0.1, reachability=0.1),
    "product keys": lambda: ProductKeyGate(P, N, k=3, heads=2),
    "hash": lambda: HashGate(9, N),
}


def largest_allocation(gate):
    """Bytes of the largest tensor that one step makes, after another that has made the optimisers' state."""
    for name in ("split_weight", "selector_weight"):
        if hasattr(gate, name):
            torch.nn.init.normal_(getattr(gate, name))
    moe = MoE(experts=NeuronExperts(N, P, 3, sparse=True), gate=gate)
    lazy = LazyAdam(moe.experts.parameters())
    x, keys = torch.randn(ROWS, P), torch.randint(9, (ROWS,))

    def step():
        y, routing = moe(x, keys=keys)
        (y.square().sum() + routing.aux_loss).backward()
        lazy.step()
        comet_moe.step(moe)
        moe.zero_grad()
        assert routing.execution == "sparse"

    step()
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    return max(event.self_cpu_memory_usage for event in profile.events())


@pytest.mark.parametrize("name", GATES)
def test_no_tensor_of_all_rows_and_experts_is_made_in_a_training_step(name):
    # A mask (B, n) has as many bytes. Gradients of biases and statistics of nodes are of 3 · 2 · n floats.
    assert largest_allocation(GATES[name]()) < ROWS * N


def test_a_gate_that_computes_all_weights_would_be_found():
    gate = GATES["hard trees"]()
    gate.keeps_contributions = True
    assert largest_allocation(gate) >= 4 * ROWS * N
