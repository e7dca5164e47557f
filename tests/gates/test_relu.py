"""ReluGate: its weights and auxiliary loss, how its coefficient moves, and that it trains."""

import pytest
import torch
from torch import nn

import comet_moe
from comet_moe import MoE
from comet_moe.experts import DenseExperts
from comet_moe.gates import ReluGate


def test_weights_are_the_positive_logits_and_the_loss_is_their_mean_sum():
    gate, x = ReluGate(5, 6, target=2), torch.randn(40, 5)
    gate.coefficient.fill_(0.5)
    routing = gate(x)
    wanted = nn.functional.linear(x, gate.weight, gate.bias).relu()
    torch.testing.assert_close(routing.weights, wanted)
    torch.testing.assert_close(routing.aux_loss, 0.5 * wanted.sum(-1).mean())
    assert gate.eval()(x).aux_loss == 0


def test_a_new_gate_is_nearly_dense_and_its_rows_sum_to_about_one():
    weights = ReluGate(100, 16, target=2)(torch.randn(5000, 100)).weights
    # P(N(1, 1) > 0) = 0.841 and E[relu(N(1, 1))] = 1.083; W itself varies the standard deviation a little.
    assert (weights > 0).double().mean().item() == pytest.approx(0.841, abs=0.02)
    assert weights.sum(-1).mean().item() == pytest.approx(1.083, abs=0.05)


def constant_gate(active, n=6, target=2):
    gate = ReluGate(4, n, target=target)
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.copy_(torch.where(torch.arange(n) < active, 1.0, -1.0))
    return gate


@pytest.mark.parametrize(("active", "factor"), [(0, 1 / 1.2), (1, 1 / 1.2), (2, 1.0), (3, 1.2), (6, 1.2)])
def test_the_coefficient_moves_toward_the_target(active, factor):
    gate = constant_gate(active)
    assert gate.coefficient.item() == pytest.approx(1e-8)
    gate(torch.randn(3, 4))
    comet_moe.step(gate)
    assert gate.coefficient.item() == pytest.approx(1e-8 * factor)
    comet_moe.step(gate)  # no rows since the last step
    assert gate.coefficient.item() == pytest.approx(1e-8 * factor)


def test_rows_of_all_training_passes_since_the_last_step_count_and_padding_does_not():
    gate = constant_gate(3)
    gate(torch.randn(2, 5, 4))
    gate(torch.randn(4, 4), mask=torch.tensor([True, False, False, False]))
    gate.eval()(torch.randn(7, 4))
    assert gate.active_and_rows.tolist() == [3 * 11, 11]
    assert "active_and_rows" not in gate.state_dict()


def test_the_coefficient_stays_within_its_range():
    for active, limit in ((0, 1e-12), (6, 1.0)):
        gate = constant_gate(active)
        gate.coefficient.fill_(limit)
        gate(torch.randn(3, 4))
        comet_moe.step(gate)
        assert gate.coefficient.item() == pytest.approx(limit)


def test_the_coefficient_survives_half_precision():
    assert ReluGate(4, 3).half().coefficient.item() == pytest.approx(1e-8)


def test_it_learns_a_task_with_the_wanted_number_of_experts():
    torch.manual_seed(0)
    p, n, target = 16, 16, 2
    teacher = nn.Sequential(nn.Linear(p, 32), nn.Tanh(), nn.Linear(32, 4)).requires_grad_(False)
    gate = ReluGate(p, n, target=target)
    moe = MoE(experts=DenseExperts(n, p, 16), gate=gate)
    head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam([*moe.parameters(), *head.parameters()], lr=3e-3)
    active = []
    for _ in range(600):
        x = torch.randn(256, p)
        y, routing = moe(x)
        loss = (head(y) - 3 * teacher(x)).square().mean()
        optimizer.zero_grad()
        (loss + routing.aux_loss).backward()
        optimizer.step()
        comet_moe.step(moe)
        active.append((routing.weights > 0).double().sum(-1).mean().item())
    assert active[0] > 0.7 * n
    assert sum(active[-100:]) / 100 == pytest.approx(target, abs=0.7)
    x = torch.randn(4096, p)
    y = 3 * teacher(x)
    with torch.no_grad():
        assert (head(moe.eval()(x)[0]) - y).square().mean() < 0.1 * y.var(0).mean()
