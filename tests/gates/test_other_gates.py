"""Top-k, DSelect-k, hash and softmax: what each promises beyond the golden numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.gates import DSelectKGate, HashGate, SoftmaxGate, TopKGate


@given(n=st.integers(1, 30), k=st.integers(1, 40))
def test_top_k_keeps_exactly_k_of_n(n, k):
    weights = TopKGate(5, n, k)(torch.randn(6, 5)).weights
    assert ((weights != 0).sum(-1) == min(n, k)).all()


def test_top_1_of_all_is_the_full_softmax_probability_and_trains():
    gate, x = TopKGate(5, 6, k=1, normalize="all"), torch.randn(8, 5)
    routing = gate(x)
    full = torch.nn.functional.linear(x, gate.weight, gate.bias).softmax(-1)
    torch.testing.assert_close(routing.weights.amax(-1), full.amax(-1))
    routing.weights.sum().backward()
    assert gate.weight.grad.abs().max() > 0


def test_top_1_of_selected_has_no_gradient_and_says_so():
    gate = TopKGate(5, 6, k=1)
    gate(torch.randn(8, 5)).weights.square().sum().backward()
    assert gate.weight.grad.abs().max() == 0
    assert gate.idle_parameters() == {"weight", "bias"}


def test_noise_acts_in_training_only_and_is_trained():
    gate, x = TopKGate(5, 6, k=2, noise=True), torch.randn(200, 5)
    assert not torch.equal(gate(x).weights, gate(x).weights)
    gate(x).weights[:, 0].sum().backward()
    assert gate.noise_weight.grad.abs().max() > 0
    gate.eval()
    assert torch.equal(gate(x).weights, gate(x).weights)


def test_noise_has_the_standard_deviation_of_its_softplus():
    gate = TopKGate(1, 2, k=2, noise=True)
    with torch.no_grad():
        gate.weight.zero_()
    logits = gate(torch.ones(40_000, 1)).weights.log()
    spread = (logits[:, 0] - logits[:, 1]).detach().std()  # the difference of two independent noises
    assert abs(spread.item() / (2**0.5 * 0.6931) - 1) < 0.02  # its standard error is 0.35 %


@given(n=st.integers(1, 40), k=st.integers(1, 4), seed=st.integers(0, 99))
def test_dselect_rows_miss_just_the_unreachable_mass(n, k, seed):
    torch.manual_seed(seed)
    gate = DSelectKGate(6, n, k, gamma=3.0)
    torch.nn.init.normal_(gate.selector_weight)
    sums = gate(torch.randn(9, 6)).weights.sum(-1)
    assert (sums <= 1 + 1e-6).all()
    if gate.sums_to_one:
        assert ((sums - 1).abs() < 1e-6).all()


def test_dselect_reads_bits_most_significant_first():
    gate = DSelectKGate(1, 8, k=1)
    with torch.no_grad():
        gate.selector_weight.zero_()
        gate.selector_bias.copy_(torch.tensor([[1.0, 1.0, -1.0]]))
    assert gate(torch.zeros(1, 1)).weights.argmax().item() == 0b110


def test_dselect_penalty_is_entropy_and_reachability_by_their_weights():
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


def test_hash_sends_a_key_always_to_its_expert():
    gate = HashGate(num_keys=50, num_experts=7, seed=3)
    keys = torch.randint(50, (30,))
    weights = gate(torch.randn(30, 2), keys=keys).weights
    assert torch.equal(weights.argmax(-1), gate.assignment[keys])
    assert torch.equal(weights.sum(-1), torch.ones(30))


def test_hash_tables_follow_their_seed_and_are_near_uniform():
    first, same, other = (HashGate(20_000, 8, seed=s).assignment for s in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert (torch.bincount(first) - 2500).abs().max() < 5 * 2187**0.5  # five standard deviations


def test_balanced_hash_evens_out_frequencies():
    frequencies = torch.tensor([100.0, 50, 50, 30, 30, 30, 10])
    gate = HashGate.balanced(frequencies, 3)
    load = torch.zeros(3).index_add(0, gate.assignment, frequencies)
    assert load.tolist() == [100.0, 110.0, 90.0]  # 100 | 50 30 30 | 50 30 10


def test_hash_table_is_in_the_state_dict():
    gate, other = HashGate(50, 7, seed=1), HashGate(50, 7, seed=2)
    other.load_state_dict(gate.state_dict())
    assert torch.equal(gate.assignment, other.assignment)


def test_softmax_is_dense():
    weights = SoftmaxGate(5, 6)(torch.randn(8, 5)).weights
    assert (weights > 0).all()


@pytest.mark.parametrize(
    "gate",
    [TopKGate(4, 6, 2), DSelectKGate(4, 6, 2, entropy=1.0), SoftmaxGate(4, 6)],
    ids=lambda g: type(g).__name__,
)
def test_glorot_or_small_start_and_float64(gate):
    gate = gate.double()
    x = torch.randn(3, 4, dtype=torch.float64)
    assert gate(x).weights.dtype == torch.float64


@pytest.mark.parametrize("n", [1, 2, 5, 8, 13, 16])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("make", [lambda n, k: TopKGate(6, n, k), lambda n, k: hard_dselect(n, k)])
def test_top_k_and_hard_dselect_give_their_pairs_directly(make, n, k):
    gate, x = make(n, k).eval(), torch.randn(50, 6)
    dense = gate(x)
    with torch.no_grad():
        direct = gate(x)
    assert direct.in_pairs
    torch.testing.assert_close(direct.weights, dense.weights.detach())
    assert torch.equal(direct.weights != 0, dense.weights != 0)


def hard_dselect(n, k):
    gate = DSelectKGate(6, n, k, gamma=1e-6)
    torch.nn.init.normal_(gate.selector_weight)
    return gate
