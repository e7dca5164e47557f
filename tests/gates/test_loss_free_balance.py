"""Loss-free balancing of TopKGate: how the bias moves, and that it balances."""

import pytest
import torch

import comet_moe
from comet_moe import MoE
from comet_moe.experts import DenseExperts
from comet_moe.gates import TopKGate


def fixed_choice_gate(**settings):
    """A gate over 4 experts that scores expert i by feature i."""
    gate = TopKGate(4, 4, **settings)
    with torch.no_grad():
        gate.weight.copy_(torch.eye(4))
    return gate


ROWS = torch.tensor([[3.0, 0, 0, 0], [3.0, 0, 0, 0], [0, 3.0, 0, 0], [0, 0, 3.0, 0]])


def test_the_bias_moves_up_where_an_expert_is_chosen_less_than_the_average():
    gate = fixed_choice_gate(k=1, bias_update=0.5)
    gate(ROWS)
    assert gate.choice_counts.tolist() == [2, 1, 1, 0]
    comet_moe.step(gate)
    assert gate.balance_bias.tolist() == [-0.5, 0, 0, 0.5]
    assert gate.choice_counts.tolist() == [0, 0, 0, 0]
    comet_moe.step(gate)  # no pass since the last step: nothing to move by
    assert gate.balance_bias.tolist() == [-0.5, 0, 0, 0.5]


def test_passes_are_summed_until_the_step_and_evaluation_and_padding_are_not_counted():
    gate = fixed_choice_gate(k=1, bias_update=0.5)
    gate(ROWS)
    gate(ROWS.reshape(2, 2, 4), mask=torch.tensor([[True, False], [False, True]]))
    gate.eval()(ROWS)
    assert gate.choice_counts.tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_bias_decides_who_is_chosen_and_no_weight(score):
    gate = fixed_choice_gate(k=2, score=score, bias_update=0.1)
    plain = fixed_choice_gate(k=2, score=score)
    x = torch.tensor([[1.0, 0.9, -1.0, -2.0]])
    assert torch.equal(gate(x).weights != 0, torch.tensor([[True, True, False, False]]))
    torch.testing.assert_close(gate(x).weights, plain(x).weights)
    gate.balance_bias[3] = 2.0
    weights = gate(x).weights
    scores = torch.sigmoid(x) if score == "sigmoid" else x.softmax(-1)
    wanted = scores * torch.tensor([1.0, 0, 0, 1])
    torch.testing.assert_close(weights, wanted / wanted.sum())


def test_without_updates_there_is_no_bias_and_the_state_is_as_it_was():
    gate = TopKGate(4, 4, k=2)
    assert gate.balance_bias is None
    assert gate.state_dict().keys() == {"weight", "bias"}
    gate.step()
    balanced = TopKGate(4, 4, k=2, bias_update=0.1)
    assert balanced.state_dict().keys() == {"weight", "bias", "balance_bias"}
    assert {name for name, _ in balanced.named_parameters()} == {"weight", "bias"}


def test_a_gate_whose_bias_is_zero_chooses_as_without():
    x = torch.randn(100, 8)
    gate, balanced = TopKGate(8, 16, k=3), TopKGate(8, 16, k=3, bias_update=0.1)
    balanced.load_state_dict(gate.state_dict(), strict=False)
    assert torch.equal(gate(x).weights, balanced(x).weights)


def test_small_updates_survive_half_precision():
    gate = fixed_choice_gate(k=1, bias_update=0.001).bfloat16()
    assert (gate.weight.dtype, gate.balance_bias.dtype) == (torch.bfloat16, torch.float32)
    with torch.no_grad():
        gate.balance_bias.fill_(1.0)
    gate(ROWS.bfloat16())
    comet_moe.step(gate)
    torch.testing.assert_close(gate.balance_bias, 1 + torch.tensor([-0.001, 0, 0, 0.001]))
    assert fixed_choice_gate(bias_update=0.1).double().balance_bias.dtype == torch.float64


def test_groups_keep_the_choice_within_the_best_groups():
    """Two groups of three: the second has the best pair, the first the best expert."""
    gate = TopKGate(6, 6, k=3, score="sigmoid", groups=2, top_groups=1)
    with torch.no_grad():
        gate.weight.copy_(torch.eye(6))
    x = torch.tensor([[3.0, -3.0, -3.0, 2.0, 2.0, -5.0]])
    assert (gate(x).weights != 0).tolist() == [[False] * 3 + [True] * 3]
    assert (TopKGate.forward(gate.eval(), -x).weights != 0).tolist() == [[True] * 3 + [False] * 3]


def train(bias_update, score, seed=0):
    """Load ratio of Top-2 of 16 after a regression on inputs that share a common direction."""
    torch.manual_seed(seed)
    p, n = 16, 16
    common = p**0.5 * torch.nn.functional.normalize(torch.randn(p), dim=0)
    teacher = torch.nn.Linear(p, 4).requires_grad_(False)
    gate = TopKGate(p, n, k=2, score=score, bias_update=bias_update)
    moe = MoE(experts=DenseExperts(n, p, 4), gate=gate)
    steps = 500
    optimizer = torch.optim.Adam(moe.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        x = torch.randn(256, p)
        y, _ = moe(x + common)
        optimizer.zero_grad()
        (y - teacher(x).relu()).square().mean().backward()
        optimizer.step()
        schedule.step()
        comet_moe.step(moe)
    with torch.no_grad():
        return moe.eval()(torch.randn(4096, p) + common)[1].statistics()["load_ratio"]


@pytest.mark.slow
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_skewed_inputs_are_balanced_with_the_bias_and_are_not_without(score):
    assert train(0.0, score) > 3
    assert train(0.003, score) <= 1.3
