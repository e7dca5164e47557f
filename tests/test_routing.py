"""Routing: its two forms, and its statistics."""

import math

import torch

from comet_moe import Routing
from comet_moe.gates import CometGate, TopKGate

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


def test_a_routing_from_pairs_makes_the_same_weights():
    pairs = Routing(weights=WEIGHTS).pairs()
    routing = Routing.from_pairs(pairs, torch.Size([4]), 3)
    assert torch.equal(routing.weights, WEIGHTS)
    assert float(routing.aux_loss) == 0
    assert routing.statistics() == Routing(weights=WEIGHTS).statistics()


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
        assert full.statistics() == other.masked(mask).statistics()


def test_renumbering_agrees_between_all_forms():
    order = torch.tensor([2, 0, 1])
    full = Routing(weights=WEIGHTS).renumbered(order)
    for other in other_forms():
        assert torch.equal(full.weights, other.renumbered(order).weights)
    assert torch.equal(full.weights[:, order], WEIGHTS)


def test_statistics_of_a_small_case_by_hand():
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


def test_statistics_are_plain_data():
    import json

    for routing in (CometGate(4, 6, k=2)(torch.randn(5, 4)), TopKGate(4, 6, k=2)(torch.randn(0, 4))):
        assert json.loads(json.dumps(routing.statistics())) == routing.statistics()
