"""HashGate: keys, assignments and balance."""

import pytest
import torch

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
