"""One choice of experts for all tasks: how many run, which, their weights, and wrong arguments."""

import pytest
import torch

from comet_moe import MultiGateMoE, Routing
from comet_moe.experts import DenseExperts
from comet_moe.gates import CometGate, JointSelection, Regularizer, SoftmaxGate, TopKGate
from comet_moe.gates.losses import load_balancing_loss


def used_experts(routings):
    return torch.stack([routing.weights != 0 for routing in routings]).any(0).sum(-1)


@pytest.mark.parametrize("score", ["sum", "max"])
@pytest.mark.parametrize(("k_shared", "k_private"), [(1, 0), (2, 1), (3, 2), (9, 0), (5, 7)])
@pytest.mark.parametrize(
    "make", [SoftmaxGate, lambda p, n: TopKGate(p, n, k=3), lambda p, n: CometGate(p, n, k=2)]
)
def test_every_row_uses_at_most_the_experts_that_are_allowed(score, k_shared, k_private, make):
    gates = [make(8, 9) for _ in range(3)]
    moe = MultiGateMoE(
        experts=DenseExperts(9, 8, 4), gates=gates, joint=JointSelection(k_shared, k_private, score)
    )
    _, routings = moe(torch.randn(20, 8))
    assert int(used_experts(routings).max()) <= min(9, k_shared + 3 * k_private)


def test_the_shared_experts_have_the_largest_score_over_tasks():
    weights = torch.rand(2, 30, 6)
    weights /= weights.sum(-1, keepdim=True)
    chosen = JointSelection(2)([Routing(weights=own) for own in weights])
    wanted = weights.sum(0).topk(2).indices.sort().values
    for routing in chosen:
        assert torch.equal(routing.weights.topk(2).indices.sort().values, wanted)


def test_weights_keep_their_proportions_and_the_sum_of_the_row():
    weights = torch.rand(2, 30, 6)
    chosen = JointSelection(2, 1)([Routing(weights=own) for own in weights])
    for own, routing in zip(weights, chosen, strict=True):
        torch.testing.assert_close(routing.weights.sum(-1), own.sum(-1))
        ratio = (routing.weights / own).amax(-1, keepdim=True)
        torch.testing.assert_close(routing.weights, torch.where(routing.weights > 0, own * ratio, 0.0))


def test_a_task_that_selected_none_of_the_shared_experts_weighs_them_by_score():
    weights = torch.tensor([[[0.5, 0.3, 0.2, 0.0, 0.0]], [[0.0, 0.0, 0.0, 0.25, 0.25]]])
    first, second = JointSelection(2)([Routing(weights=own) for own in weights])
    torch.testing.assert_close(first.weights, torch.tensor([[0.625, 0.375, 0.0, 0.0, 0.0]]))
    torch.testing.assert_close(second.weights, torch.tensor([[0.3125, 0.1875, 0.0, 0.0, 0.0]]))


def test_a_row_without_experts_and_experts_outside_a_subset_stay_without_weight():
    empty = Routing(weights=torch.zeros(1, 3))
    own = Routing(weights=torch.tensor([[1.0]])).embedded(torch.tensor([2]), 3)
    full = Routing(weights=torch.tensor([[0.6, 0.4, 0.0]]))
    chosen = JointSelection(1)([full, empty, own])
    assert chosen[1].weights.tolist() == [[0.0, 0.0, 0.0]]
    assert chosen[2].weights[0, :2].tolist() == [0.0, 0.0]


def test_as_many_experts_as_there_are_change_nothing():
    weights = torch.rand(2, 5, 6)
    for own, routing in zip(weights, JointSelection(6)([Routing(weights=w) for w in weights]), strict=True):
        torch.testing.assert_close(routing.weights, own)


def test_gradients_reach_every_gate():
    gates = [SoftmaxGate(8, 9) for _ in range(2)]
    moe = MultiGateMoE(experts=DenseExperts(9, 8, 4), gates=gates, joint=JointSelection(2))
    ys, _ = moe(torch.randn(20, 8))
    sum(y.square().sum() for y in ys).backward()
    assert all(gate.weight.grad.abs().sum() > 0 for gate in gates)


def test_a_regularizer_of_a_mixture_counts_all_gates_together_and_once():
    gates = [TopKGate(8, 6, k=2) for _ in range(2)]
    moe = MultiGateMoE(experts=DenseExperts(6, 8, 4), gates=gates, regularizer=Regularizer(load_balance=0.5))
    _, routings = moe(torch.randn(20, 8))
    torch.testing.assert_close(
        sum(routing.aux_loss for routing in routings), 0.5 * load_balancing_loss(routings)
    )
    _, routings = moe.eval()(torch.randn(20, 8))
    assert float(sum(routing.aux_loss for routing in routings)) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "k_shared must be an integer of at least 1, got 0"),
        ((1, -1), "k_private must be an integer of at least 0, got -1"),
        ((1, 0, "mean"), 'score must be "sum" or "max", got \'mean\''),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        JointSelection(*arguments)
