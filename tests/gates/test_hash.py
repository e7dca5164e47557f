"""HashGate: keys, assignments and balance."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comet_moe.gates import HashGate


def test_a_key_always_goes_to_its_expert():
    gate = HashGate(num_keys=50, num_experts=7, seed=3)
    keys = torch.randint(50, (30,))
    weights = gate(torch.randn(30, 2), keys=keys).weights
    assert torch.equal(weights.argmax(-1), gate.assignment[keys])
    assert torch.equal(weights.sum(-1), torch.ones(30))


def test_assignments_follow_their_seed_and_are_near_uniform():
    first, same, other = (HashGate(20_000, 8, seed=s).assignment for s in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert (torch.bincount(first) - 2500).abs().max() < 5 * 2187**0.5  # five standard deviations


def test_balanced_hash_evens_out_frequencies():
    frequencies = torch.tensor([100.0, 50, 50, 30, 30, 30, 10])
    gate = HashGate.balanced(frequencies, 3)
    load = torch.zeros(3).index_add(0, gate.assignment, frequencies)
    assert load.tolist() == [100.0, 110.0, 90.0]  # 100 | 50 30 30 | 50 30 10


def test_the_assignment_is_in_the_state_dict():
    gate, other = HashGate(50, 7, seed=1), HashGate(50, 7, seed=2)
    other.load_state_dict(gate.state_dict())
    assert torch.equal(gate.assignment, other.assignment)


@pytest.mark.parametrize(
    ("frequencies", "says"),
    [
        (torch.empty(0, 3), r"must be a vector \(keys,\), got shape \(0, 3\)"),
        (torch.ones(2, 3), r"must be a vector \(keys,\), got shape \(2, 3\)"),
        (torch.empty(0), "num_keys must be an integer of at least 1, got 0"),
        (torch.tensor([1.0, -2.0]), "finite numbers of at least 0, got -2"),
        (torch.tensor([1.0, float("nan")]), "finite numbers of at least 0, got nan"),
        (torch.tensor([1.0, float("inf")]), "finite numbers of at least 0, got inf"),
    ],
)
def test_frequencies_that_cannot_be_balanced_are_refused(frequencies, says):
    with pytest.raises(ValueError, match=says):
        HashGate.balanced(frequencies, 4)


def test_frequencies_may_be_counts():
    assert HashGate.balanced(torch.tensor([5, 3, 2]), 2).assignment.tolist() == [0, 1, 1]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_the_experts_of_a_key_differ_and_the_first_is_that_of_one_expert(n, k, seed):
    table = HashGate(40, n, seed, k=k).assignment.reshape(40, -1)
    assert table.shape == (40, min(k, n))
    assert all(len(set(row)) == min(k, n) for row in table.tolist())
    assert 0 <= int(table.min()) <= int(table.max()) < n
    assert torch.equal(table[:, 0], HashGate(40, n, seed).assignment)


def test_every_set_of_experts_is_about_as_likely():
    table = HashGate(30_000, 5, k=2).assignment
    pairs = (table.sort(-1).values @ torch.tensor([5, 1])).bincount()
    counts = pairs[pairs > 0]
    assert len(counts) == 10
    assert (counts - 3000).abs().max() < 5 * 2700**0.5  # five standard deviations


def test_uniform_weights_are_equal_and_sum_to_the_scale():
    keys = torch.randint(50, (30,))
    weights = HashGate(50, 7, k=3, scale=1.5)(torch.randn(30, 2), keys=keys).weights
    assert weights.sum(-1).tolist() == pytest.approx([1.5] * 30)
    assert weights[weights != 0].tolist() == pytest.approx([0.5] * 90)


SCORES = {
    "softmax": lambda logits: logits.exp(),
    "sigmoid": lambda logits: logits.sigmoid(),
    "sqrtsoftplus": lambda logits: (1 + logits.exp()).log().sqrt(),
}


@pytest.mark.parametrize("score", SCORES)
def test_learned_weights_are_shares_of_the_scores_of_the_chosen(score):
    gate = HashGate(50, 7, k=3, weights="learned", in_features=4, score=score, scale=1.5).double()
    keys, x = torch.randint(50, (30,)), torch.randn(30, 4, dtype=torch.float64)
    routing = gate(x, keys=keys)
    chosen = torch.zeros(30, 7, dtype=torch.bool).scatter(1, gate.assignment[keys], True)
    scores = SCORES[score](x @ gate.weight.T + gate.bias) * chosen
    torch.testing.assert_close(routing.weights, 1.5 * scores / scores.sum(-1, keepdim=True))
    routing.weights.square().sum().backward()
    assert gate.weight.grad.any()
    with torch.no_grad():
        torch.testing.assert_close(gate(x, keys=keys).weights, routing.weights)


@pytest.mark.parametrize("score", SCORES)
def test_extreme_logits_give_finite_weights_and_gradients(score):
    gate = HashGate(4, 3, k=3, weights="learned", in_features=1, score=score)
    with torch.no_grad():
        gate.weight.copy_(torch.tensor([[1e4], [-1e4], [-2e4]]))
    routing = gate(torch.tensor([[1.0], [-1.0]]), keys=torch.zeros(2, dtype=torch.int64))
    routing.weights[:, 0].sum().backward()
    assert routing.weights.sum(-1).tolist() == pytest.approx([1, 1])
    assert gate.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"weights": "some"}, 'weights must be "uniform" or "learned"'),
        ({"score": "relu"}, 'score must be "softmax", "sigmoid" or "sqrtsoftplus"'),
        ({"k": 2, "weights": "learned"}, "pass in_features"),
        ({"weights": "learned", "in_features": 4}, "at least 2 experts per key, got k=1"),
        ({"k": 0}, "k must be"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given_settings, message):
    with pytest.raises(ValueError, match=message):
        HashGate(9, 4, **given_settings)
