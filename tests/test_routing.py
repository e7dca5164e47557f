"""Routing: its three forms, its largest weights, its checks and its statistics."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comet_moe import Routing
from comet_moe.gates import CometGate, DSelectKGate, Gate, TopKGate

WEIGHTS = torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [1 - 1e-6, 1e-6, 0.0]])


def test_pairs_are_the_nonzero_entries_of_flattened_rows():
    sample, expert, weight = Routing(weights=WEIGHTS.reshape(2, 2, 3)).pairs()
    assert sample.tolist() == [0, 0, 1, 2, 3, 3]
    assert expert.tolist() == [0, 2, 2, 0, 0, 1]
    assert torch.equal(weight, WEIGHTS[WEIGHTS != 0])


def test_pairs_carry_the_gradient():
    weights = WEIGHTS.clone().requires_grad_()
    Routing(weights=weights).pairs().weight.sum().backward()
    assert torch.equal(weights.grad, (WEIGHTS != 0).float())


@pytest.mark.parametrize("form", ["weights", "pairs", "slots"])
def test_what_is_read_without_gradients_does_not_take_them_from_what_is_read_later(form):
    weight = torch.tensor([[0.25, 0.75]], requires_grad=True)
    routing = {
        "weights": lambda: Routing(weights=weight),
        "pairs": lambda: Routing.from_pairs(Routing(weights=weight).pairs(), torch.Size([1]), 2),
        "slots": lambda: Routing.from_slots(torch.tensor([[0, 1]]), weight, torch.Size([1]), 2),
    }[form]()
    routing.statistics()
    with torch.no_grad():
        torch.testing.assert_close(routing.weights[0, routing.pairs().expert], routing.pairs().weight)
    assert routing.pairs().weight.requires_grad
    assert routing.weights.requires_grad


def assert_same_statistics(routing, other):
    """Sums of float32 numbers in two orders differ in their last bits."""
    mine, others = routing.statistics(), other.statistics()
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        is_plain = value is None or isinstance(value, str)
        assert others[name] == (value if is_plain else pytest.approx(value, rel=1e-6)), name


def test_a_routing_from_pairs_makes_the_same_weights():
    pairs = Routing(weights=WEIGHTS).pairs()
    routing = Routing.from_pairs(pairs, torch.Size([4]), 3)
    assert torch.equal(routing.weights, WEIGHTS)
    assert float(routing.aux_loss) == 0
    assert_same_statistics(routing, Routing(weights=WEIGHTS))


def other_forms():
    shape = torch.Size([4])
    weight, expert = WEIGHTS.topk(2)
    return [
        Routing.from_pairs(Routing(weights=WEIGHTS).pairs(), shape, 3),
        Routing.from_slots(expert, weight, shape, 3),
    ]


def test_masking_agrees_between_all_forms():
    mask = torch.tensor([True, False, True, True])
    full = Routing(weights=WEIGHTS).masked(mask)
    for other in other_forms():
        assert torch.equal(full.weights, other.masked(mask).weights)
        assert_same_statistics(full, other.masked(mask))


class UniformGateThatKeepsTheMask(Gate):
    num_experts = 3

    def forward(self, x, keys=None, mask=None):
        return Routing(weights=torch.full((*x.shape[:-1], 3), 1 / 3), mask=mask)


def test_a_routing_that_came_with_the_mask_is_masked_too():
    mask = torch.tensor([True, False])
    routing = UniformGateThatKeepsTheMask()(torch.zeros(2, 4), mask=mask)
    assert routing.weights.sum(-1).tolist() == [1, 0]
    assert routing.statistics()["experts_per_sample"] == 3


def test_masking_twice_with_one_mask_copies_nothing():
    mask = torch.tensor([True, False, True, True])
    routing = Routing(weights=WEIGHTS).masked(mask)
    assert routing.masked(mask) is routing
    renumbered = routing.renumbered(torch.tensor([2, 0, 1]))
    assert renumbered.masked(mask) is renumbered
    assert routing.masked(torch.tensor([False, True, True, True])).weights[0].sum() == 0


@pytest.mark.parametrize("gate", [CometGate(4, 6, k=2), DSelectKGate(4, 6, k=2)])
def test_contributions_sum_to_the_weights_of_padding_too(gate):
    mask = torch.tensor([True, False, True])
    routing = gate(torch.randn(3, 4), mask=mask)
    assert (routing.contributions[1] == 0).all()
    torch.testing.assert_close(routing.contributions.sum(-2), routing.weights)


def test_renumbering_drops_contributions_in_every_form():
    contributions = torch.rand(4, 2, 3)
    for form in (Routing(weights=WEIGHTS), *other_forms()):
        form.contributions = contributions
        assert form.renumbered(torch.tensor([2, 0, 1])).contributions is None


def test_renumbering_agrees_between_all_forms():
    order = torch.tensor([2, 0, 1])
    full = Routing(weights=WEIGHTS).renumbered(order)
    for other in other_forms():
        assert torch.equal(full.weights, other.renumbered(order).weights)
    assert torch.equal(full.weights[:, order], WEIGHTS)


@given(
    rows=st.integers(0, 6),
    n=st.integers(1, 40),
    used=st.integers(0, 9),
    k=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_the_top_weights_are_the_same_from_every_form(rows, n, used, k, seed):
    torch.manual_seed(seed)
    k, used = min(k, n), min(used, n)
    expert = torch.rand(rows, n).argsort()[:, :used]
    weight = torch.rand(rows, used) * (torch.rand(rows, used) < 0.8)
    slots = Routing.from_slots(expert, weight, torch.Size([rows]), n)
    pairs = Routing.from_pairs(slots.pairs(), torch.Size([rows]), n)
    dense = Routing(weights=torch.zeros(rows, n).scatter(1, expert, weight))
    for routing in (dense, slots, pairs):
        weights, indices = routing.top(k)
        assert weights.shape == indices.shape == (rows, k)
        assert torch.equal(weights, dense.weights.sort(descending=True).values[:, :k])
        assert torch.equal(dense.weights.gather(1, indices), weights)
        assert all(len(set(row)) == k for row in indices.tolist())  # scatter writes each weight once


@pytest.mark.parametrize("form", ["weights", "slots", "pairs"])
def test_the_top_weights_carry_the_gradient(form):
    weights = torch.tensor([[0.6, 0.0, 0.4], [0.0, 0.0, 1.0]]).reshape(2, 1, 3).requires_grad_()
    values, experts = weights.flatten(0, 1).topk(2)
    routing = {
        "weights": lambda: Routing(weights=weights),
        "slots": lambda: Routing.from_slots(experts, values, torch.Size([2, 1]), 3),
        "pairs": lambda: Routing.from_pairs(Routing(weights=weights).pairs(), torch.Size([2, 1]), 3),
    }[form]()
    top, index = routing.top(1)
    assert index.tolist() == [[[0]], [[2]]]
    top.sum().backward()
    assert weights.grad.tolist() == [[[1, 0, 0]], [[0, 0, 1]]]


@pytest.mark.parametrize("k", [0, 4, -1, 1.5, True, None])
def test_k_outside_1_to_n_is_refused(k):
    for routing in (Routing(weights=WEIGHTS), *other_forms()):
        with pytest.raises(ValueError, match=rf"k must be an integer from 1 to 3, got {k}"):
            routing.top(k)


ONES = torch.ones(4, 2)
INDICES = torch.zeros(4, 2, dtype=torch.int64)


def of_four(**form):
    return {**form, "batch_shape": torch.Size([4]), "num_experts": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"exactly one of weights \(B, \.\.\., n\), pairs and slots"),
        (of_four(), "exactly one of"),
        (of_four(slots=(INDICES, ONES), pairs=(INDICES[0], INDICES[0], ONES[0])), "exactly one of"),
        ({"weights": WEIGHTS, "slots": (INDICES, ONES)}, "exactly one of"),
        ({"weights": WEIGHTS[0]}, r"weights must have shape \(B, \.\.\., n\), got \(3,\)"),
        (
            {"slots": (INDICES, ONES)},
            "needs batch_shape and num_experts of at least 1, got batch_shape=None and num_experts=0",
        ),
        ({"slots": (INDICES, ONES), "batch_shape": torch.Size([4])}, "num_experts=0"),
        (of_four(slots=(INDICES[1:], ONES[1:])), r"\(4, slots per row\) each, got \(3, 2\) and \(3, 2\)"),
        (of_four(slots=(INDICES, ONES[:, :1])), r"got \(4, 2\) and \(4, 1\)"),
        (of_four(pairs=(INDICES[0], INDICES[0], ONES[0, :1])), r"got \(2,\), \(2,\) and \(1,\)"),
        ({"weights": WEIGHTS, "logits": ONES}, r"logits must have shape \(4, 3\) .* got \(4, 2\)"),
        ({"weights": WEIGHTS, "mask": ONES[:3, 0] > 0}, r"mask must have shape \(4,\) .* got \(3,\)"),
        (
            {"weights": WEIGHTS, "selectors": WEIGHTS},
            r"selectors must have shape \(4, k, 3\) .* got \(4, 3\)",
        ),
        (
            {"weights": WEIGHTS, "contributions": torch.ones(4, 2, 2)},
            r"contributions must have shape \(4, k, 3\) .* got \(4, 2, 2\)",
        ),
    ],
)
def test_tensors_that_disagree_in_shape_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Routing(**arguments)


def test_statistics_equal_those_worked_out_by_hand():
    statistics = Routing(weights=WEIGHTS).statistics()
    assert statistics["samples"] == 4
    assert statistics["experts_per_sample"] == 5 / 4  # 1e-6 does not count
    assert statistics["share_of_samples"] == [3 / 4, 0, 2 / 4]
    assert math.isclose(statistics["share_of_weight"][2], 1.5 / (4 - 1e-6), rel_tol=1e-6)
    assert statistics["dead_experts"] == [1]
    assert statistics["tree_entropy"] is None
    assert statistics["one_hot_trees"] is None


def test_padding_is_left_out_of_statistics():
    mask = torch.tensor([True, False, True, True])
    statistics = Routing(weights=WEIGHTS).masked(mask).statistics()
    assert statistics["samples"] == 3
    assert statistics["experts_per_sample"] == 4 / 3
    assert statistics["share_of_samples"] == [1, 0, 1 / 3]


def test_tree_entropy_and_share_of_one_hot_trees():
    selectors = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [1.0, 0.0]]])
    routing = Routing(weights=selectors.mean(1), selectors=selectors)
    assert math.isclose(routing.statistics()["tree_entropy"], math.log(2) / 4, rel_tol=1e-6)
    assert routing.statistics()["one_hot_trees"] == 3 / 4
    torch.testing.assert_close(torch.tensor(routing.statistics()["leaf_share"]), selectors.mean(0))
    routing = routing.masked(torch.tensor([False, True]))
    assert routing.statistics()["one_hot_trees"] == 1


def test_statistics_can_be_written_as_json():
    for routing in (CometGate(4, 6, k=2)(torch.randn(5, 4)), TopKGate(4, 6, k=2)(torch.randn(0, 4))):
        assert json.loads(json.dumps(routing.statistics())) == routing.statistics()
