"""Losses that balance gates: values, equality with transformers, several gates together, effect on loads."""

import math

import pytest
import torch
from gate_laws import COMPILED, check_laws

from comet_moe import MoE, Permutation, PermutedGate, Routing
from comet_moe.experts import DenseExperts
from comet_moe.gates import CometGate, HashGate, RegularizedGate, Regularizer, SoftmaxGate, TopKGate
from comet_moe.gates.losses import information_loss, load_balancing_loss, z_loss

GATES = {
    "topk": lambda p, n: RegularizedGate(TopKGate(p, n, k=2), load_balance=0.1, z_loss=0.1, information=0.1),
    "comet": lambda p, n: RegularizedGate(CometGate(p, n, k=2), load_balance=0.1, information=0.1),
    "softmax": lambda p, n: RegularizedGate(SoftmaxGate(p, n), z_loss=0.1, information=0.1),
    "none": lambda p, n: RegularizedGate(TopKGate(p, n, k=2)),
    "inside a search": lambda p, n: PermutedGate(
        RegularizedGate(TopKGate(p, n, k=2), load_balance=0.1), Permutation(n, steps=5)
    ),
}


@COMPILED
@pytest.mark.parametrize("name", GATES)
def test_regularised_gates_keep_every_law(name, compiled):
    check_laws(GATES[name], compiled)


def mask_of(rows):
    return torch.arange(rows) % 4 != 1


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_load_balance_equals_that_of_transformers(k, masked):
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    torch.manual_seed(0)
    gates, x = [TopKGate(8, 6, k=k) for _ in range(3)], torch.randn(2, 10, 8)
    mask = mask_of(20).reshape(2, 10) if masked else None
    routings = [gate(x, mask=mask) for gate in gates]
    logits = tuple(routing.logits.flatten(0, 1) for routing in routings)
    for ours, theirs in ((routings, logits), (routings[0], logits[:1])):
        wanted = mixtral.load_balancing_loss_func(theirs, 6, k, None if mask is None else mask.long())
        torch.testing.assert_close(load_balancing_loss(ours), wanted, rtol=1e-6, atol=0)


def test_load_balance_is_k_at_equal_loads_and_n_times_k_at_worst():
    balanced = Routing(weights=torch.eye(4), logits=100 * torch.eye(4))
    assert float(load_balancing_loss(balanced)) == pytest.approx(1)
    crowded = Routing(weights=torch.eye(4)[:1].expand(8, 4), logits=100 * torch.eye(4)[:1].expand(8, 4))
    assert float(load_balancing_loss(crowded)) == pytest.approx(4)


def test_tasks_that_crowd_one_expert_each_are_balanced_together():
    one, other = (Routing(weights=torch.eye(2)[i].expand(5, 2)) for i in (0, 1))
    assert float(load_balancing_loss(one)) == 2
    assert float(load_balancing_loss([one, other])) == 1
    assert float(load_balancing_loss([one, one])) == 2
    assert float(information_loss(one)) == pytest.approx(0, abs=1e-5)
    assert float(information_loss([one, other])) == pytest.approx(-math.log(2), abs=1e-5)


def test_z_loss_is_the_mean_square_of_the_log_partition_function():
    logits = torch.randn(6, 4)
    mask = mask_of(6)
    wanted = logits.logsumexp(-1).square()
    weights = logits.softmax(-1)
    torch.testing.assert_close(z_loss(Routing(weights=weights, logits=logits)), wanted.mean())
    torch.testing.assert_close(
        z_loss(Routing(weights=weights, logits=logits).masked(mask)), wanted[mask].mean()
    )


def test_z_loss_without_logits_is_refused():
    with pytest.raises(ValueError, match="z_loss needs router logits"):
        z_loss(HashGate(4, 3)(torch.zeros(2, 1), keys=torch.tensor([0, 1])))


def test_rows_without_an_expert_have_no_information():
    routed = torch.tensor([[1.0, 0.0], [0.25, 0.75], [0.0, 1.0]])
    alone = information_loss(Routing(weights=routed))
    with_empty = information_loss(Routing(weights=torch.cat([routed, torch.zeros(5, 2)])))
    torch.testing.assert_close(with_empty, alone)


def test_the_information_loss_is_minus_the_information():
    weights = TopKGate(8, 6, k=2)(torch.randn(40, 8)).weights.detach()
    routing = Routing(weights=weights)
    assert float(information_loss(routing)) == pytest.approx(-routing.statistics()["information"], abs=1e-4)


def test_the_information_of_trees_is_summed_over_them():
    trees = torch.rand(30, 2, 5).softmax(-1)
    routing = Routing(weights=trees.mean(1), selectors=trees)
    each = [information_loss(Routing(weights=trees[:, j])) for j in range(2)]
    torch.testing.assert_close(information_loss(routing), sum(each))


@pytest.mark.parametrize("name", ["load_balance", "z_loss", "information"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_weights_of_losses_are_finite_and_not_negative(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a finite number of at least 0"):
        Regularizer(**{name: value})


def skewed_inputs(rows, p, generator):
    """Rows with a large common part, by which an unbalanced gate sends most of them to the same experts."""
    return torch.randn(rows, p, generator=generator) + 2.0


def train(gate, steps=600, p=16):
    """The statistics of ``gate`` after training a mixture to reproduce its input."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    moe = MoE(experts=DenseExperts(16, p, p), gate=gate)
    optimizer = torch.optim.Adam(moe.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=steps)
    for _ in range(steps):
        x = skewed_inputs(256, p, generator)
        y, routing = moe(x)
        loss = (y - x).square().mean() + routing.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    moe.eval()
    return moe(skewed_inputs(4096, p, generator))[1].statistics()


def top_2():
    torch.manual_seed(1)
    return TopKGate(16, 16, k=2)


@pytest.mark.slow
@pytest.mark.parametrize("losses", [{}, {"load_balance": 1.0}, {"information": 20.0}])
def test_balancing_evens_the_load_on_skewed_inputs(losses):
    statistics = train(RegularizedGate(top_2(), **losses))
    if losses:
        assert statistics["load_ratio"] <= 1.3
    else:
        assert statistics["load_ratio"] > 3
