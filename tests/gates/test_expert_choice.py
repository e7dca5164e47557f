"""ExpertChoiceGate: who takes which rows in training, and how evaluation routes each row on its own."""

from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.gates import ExpertChoiceGate

P = 5


@given(
    rows=st.integers(1, 40),
    n=st.integers(1, 8),
    quarters=st.integers(1, 40),
    padding=st.integers(0, 10),
)
def test_every_expert_takes_its_best_rows_and_no_padding(rows, n, quarters, padding):
    capacity = quarters / 4  # exact in floating point, so that the ceil below is
    gate, x = ExpertChoiceGate(P, n, capacity=capacity), torch.randn(rows + padding, P)
    mask = torch.randperm(rows + padding) < rows
    weights = gate(x, mask=mask).weights
    wanted = min(rows, ceil(capacity * rows / n))
    assert ((weights != 0).sum(0) == wanted).all()
    assert (weights[~mask] == 0).all()
    probability = torch.nn.functional.linear(x, gate.weight, gate.bias).softmax(-1)
    torch.testing.assert_close(weights, torch.where(weights != 0, probability, 0.0))
    refused = probability.masked_fill(weights != 0, -1).masked_fill(~mask.unsqueeze(-1), -1).amax(0)
    accepted = probability.masked_fill(weights == 0, 2).amin(0)
    assert (accepted >= refused).all()


def test_the_capacity_is_exact_where_floating_point_is_not():
    assert ceil(0.14 * 100 / 2) == 8
    weights = ExpertChoiceGate(P, 2, capacity=0.14)(torch.randn(100, P)).weights
    assert (weights != 0).sum(0).tolist() == [7, 7]


def test_equal_rows_are_taken_in_their_order():
    weights = ExpertChoiceGate(P, 4, capacity=1.0)(torch.zeros(8, P)).weights
    assert (weights != 0).all(-1).tolist() == [True, True] + [False] * 6


def test_thresholds_are_the_running_mean_of_the_lowest_accepted_probability():
    gate = ExpertChoiceGate(P, 4, capacity=1.0)
    assert gate.threshold.tolist() == [0.25] * 4
    lowest = []
    for batch in range(12):
        weights = gate(torch.randn(20, P)).weights.detach()
        lowest.append(weights.masked_fill(weights == 0, 2).amin(0))
        if batch < 10:  # the plain mean at first
            torch.testing.assert_close(gate.threshold, torch.stack(lowest).mean(0))
    wanted = torch.stack(lowest[:10]).mean(0)
    for value in lowest[10:]:
        wanted = 0.9 * wanted + 0.1 * value
    torch.testing.assert_close(gate.threshold, wanted)
    assert gate.batches_seen == 12


def test_batches_without_rows_move_no_threshold():
    gate = ExpertChoiceGate(P, 4)
    gate(torch.randn(0, P))
    gate(torch.randn(3, P), mask=torch.zeros(3, dtype=torch.bool))
    assert gate.threshold.tolist() == [0.25] * 4
    assert gate.batches_seen == 0


def test_evaluation_takes_the_rows_that_reach_the_threshold():
    gate, x = ExpertChoiceGate(P, 4).eval(), torch.randn(50, P)
    gate.threshold.copy_(torch.tensor([0.1, 0.3, 0.5, 1.1]))
    probability = torch.nn.functional.linear(x, gate.weight, gate.bias).softmax(-1)
    weights = gate(x).weights
    torch.testing.assert_close(weights, torch.where(probability >= gate.threshold, probability, 0.0))
    assert (weights[:, 3] == 0).all()


def test_evaluation_has_about_the_load_of_training():
    torch.manual_seed(0)
    gate = ExpertChoiceGate(P, 8, capacity=2.0)
    for _ in range(100):
        gate(torch.randn(256, P) + 0.5)
    loads = gate.eval()(torch.randn(20_000, P) + 0.5).statistics()["share_of_samples"]
    # Wanted is 2 / 8. The lowest of 64 accepted rows has a standard error of sqrt(0.25 * 0.75 / 256) = 0.027
    # in rank; a running mean of weight 0.1 leaves sqrt(0.1 / 1.9) of it: 0.006, of which this is four.
    assert max(abs(load - 0.25) for load in loads) < 0.025


@pytest.mark.parametrize("rows", [1, 7])
def test_a_row_is_evaluated_alike_in_every_batch(rows):
    gate, x = ExpertChoiceGate(P, 4), torch.randn(30, P)
    gate(x)
    gate.eval()
    torch.testing.assert_close(gate(x[:rows]).weights, gate(x).weights[:rows])
