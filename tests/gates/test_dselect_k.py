"""DSelectKGate: bits, unreachable codes, auxiliary loss and its start."""

import itertools

import pytest
import torch
from gate_laws import assert_slots_equal_dense, assert_uniform
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.gates import DSelectKGate, smooth_step


def unreachable_mass(gate, x):
    """Σ_j mixing_j Σ of the probabilities of the codes from n on, one code at a time: (B,)."""
    with torch.no_grad():
        bits = torch.einsum("kmp,bp->bkm", gate.selector_weight, x) + gate.selector_bias
        mixing = (x @ gate.mixing_weight.T + gate.mixing_bias).softmax(-1)
        ones = smooth_step(bits, gate.gamma)
        mass = torch.zeros(len(x), gate.k, dtype=x.dtype)
        for code, digits in enumerate(itertools.product((0, 1), repeat=bits.shape[-1])):
            if code >= gate.num_experts:
                probability = torch.ones_like(mass)
                for bit, digit in enumerate(digits):
                    probability *= ones[..., bit] if digit else 1 - ones[..., bit]
                mass += probability
        return (mixing * mass).sum(-1)


@given(n=st.integers(1, 40), k=st.integers(1, 4), seed=st.integers(0, 99))
def test_rows_miss_just_the_mass_of_unreachable_codes(n, k, seed):
    torch.manual_seed(seed)
    gate, x = DSelectKGate(6, n, k, gamma=3.0).double(), torch.randn(9, 6, dtype=torch.float64)
    torch.nn.init.normal_(gate.selector_weight)
    torch.nn.init.normal_(gate.mixing_weight)
    missing = 1 - gate(x).weights.sum(-1).detach()
    torch.testing.assert_close(missing, unreachable_mass(gate, x), rtol=0, atol=1e-12)
    assert gate.sums_to_one == (n & (n - 1) == 0)


def test_three_experts_of_four_codes_lose_mass():
    gate, x = DSelectKGate(6, 3, 2, gamma=3.0).double(), torch.randn(9, 6, dtype=torch.float64)
    assert unreachable_mass(gate, x).min() > 0.1  # else the test above would compare zeros


def test_a_new_gate_has_small_uniform_selectors_and_mixing():
    gate = DSelectKGate(500, 64, k=4, gamma=7.0)
    assert_uniform(gate.selector_weight, 7.0 / 100)
    assert_uniform(gate.mixing_weight, 0.05)
    many = DSelectKGate(2, 64, k=1000, gamma=7.0)
    assert_uniform(many.selector_bias, 7.0 / 100)
    assert_uniform(many.mixing_bias, 0.05)


@pytest.mark.parametrize("n", [1, 2, 5, 8, 13, 16])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_hard_bits_are_routed_into_slots(n, k):
    gate = DSelectKGate(6, n, k, gamma=1e-6).eval()
    torch.nn.init.normal_(gate.selector_weight)
    assert_slots_equal_dense(gate, torch.randn(50, 6))


def test_it_has_no_logits():
    assert DSelectKGate(6, 4)(torch.randn(3, 6)).logits is None


def test_reads_bits_most_significant_first():
    gate = DSelectKGate(1, 8, k=1)
    with torch.no_grad():
        gate.selector_weight.zero_()
        gate.selector_bias.copy_(torch.tensor([[1.0, 1.0, -1.0]]))
    assert gate(torch.zeros(1, 1)).weights.argmax().item() == 0b110


def test_aux_loss_is_entropy_and_reachability_by_their_weights():
    x = torch.randn(12, 4)
    gate = DSelectKGate(4, 5, k=2, entropy=0.3, reachability=0.2)
    torch.nn.init.normal_(gate.selector_weight)
    p = gate(x).selectors
    entropy = (-(p * (p + 1e-6).log())).sum((1, 2)).mean()
    reach = (1 / (1e-6 + p.sum(-1))).sum(-1).mean()
    torch.testing.assert_close(gate(x).aux_loss, 0.3 * entropy + 0.2 * reach)
    assert float(gate.eval()(x).aux_loss) == 0


def test_reachability_brings_selectors_back_to_the_experts():
    torch.manual_seed(1)
    gate, x = DSelectKGate(4, 5, k=2, reachability=1.0), torch.randn(64, 4)
    torch.nn.init.normal_(gate.selector_weight, std=0.3)
    before = gate(x).weights.sum(-1).mean()
    optimizer = torch.optim.Adam(gate.parameters(), 0.05)
    for _ in range(200):
        optimizer.zero_grad()
        gate(x).aux_loss.backward()
        optimizer.step()
    after = gate(x).weights.sum(-1).mean()
    assert after > 0.99 > before
