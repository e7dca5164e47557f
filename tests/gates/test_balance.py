"""Balanced trees, the schedule of their width, and the sum of the weights."""

from functools import partial

import pytest
import torch
from gate_laws import COMPILED, check_laws
from torch.utils.checkpoint import checkpoint

import comet_moe
from comet_moe.gates import CometGate
from comet_moe.gates.balance import balance_splits
from comet_moe.kernels.soft_trees import log_smooth_step_sides, path_sums

BALANCES = ("normalize", "median")
STATISTICS = ("split_bias", "split_deviation", "split_steps")


def skewed_rows(rows, p=6, dtype=torch.float32):
    """Features far from 0, whose median is not their mean."""
    return 3 + torch.randn(rows, p, dtype=dtype).exp()


def balanced_gate(balance, n=8, k=1, gamma=1e-4):
    gate = CometGate(6, n, k, gamma, balance=balance)
    torch.nn.init.normal_(gate.split_weight)
    return gate


def statistics_of(gate):
    return [getattr(gate, name).clone() for name in STATISTICS]


@COMPILED
@pytest.mark.parametrize("balance", BALANCES)
def test_balanced_gates_keep_the_laws(balance, compiled):
    for settings in ({}, {"gamma": (3.0, 0.1), "gamma_steps": 2, "scale": 2.5, "entropy": 0.1}):
        check_laws(partial(CometGate, k=2, balance=balance, **settings), compiled)


def test_hard_trees_with_a_running_median_have_equal_loads():
    gate = balanced_gate("median")
    for _ in range(150):
        gate(skewed_rows(512))
        comet_moe.step(gate)
    load = gate.eval()(skewed_rows(20_000)).statistics()["share_of_samples"]
    # Each share is a product of three halves, off by the noise of ten batches or so.
    assert min(load) > 0.09
    assert max(load) < 0.16


def test_nodes_with_a_row_per_step_find_the_median_and_not_the_mean():
    gate = balanced_gate("median", n=2)
    found = []
    for step in range(1500):
        gate(skewed_rows(1))
        comet_moe.step(gate)
        if step >= 500:
            found.append(gate.split_bias.clone())
    rows = skewed_rows(20_000)
    logits = (rows @ gate.split_weight[0].detach().T + torch.stack(found).mean()).flatten()
    assert 0.4 < (logits > 0).float().mean() < 0.6


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_normalised_splits_send_half_of_the_mass_to_either_side(scale):
    gate = balanced_gate("normalize", gamma=2.0)
    with torch.no_grad():
        gate.split_weight *= scale
    rows = 3 + torch.randn(4096, 6)  # symmetric, so that the mean halves them
    assert gate(rows).selectors.mean(0).sub(1 / 8).abs().max() < 0.02
    for _ in range(30):
        gate(rows)
        comet_moe.step(gate)
    trained = gate(rows).selectors
    torch.testing.assert_close(gate.eval()(rows).selectors, trained, atol=0.02, rtol=0)


def test_statistics_of_a_node_weigh_rows_by_the_probability_to_reach_it():
    splits = torch.randn(30, 2, 6, dtype=torch.float64)
    balanced, reached = balance_splits(splits, 3.0, None, normalize=True)
    left, right = (side.exp() for side in log_smooth_step_sides(balanced, 3.0))
    for node in range(6):
        parent = (node - 1) // 2
        side = left if node % 2 else right
        wanted = reached[..., parent] * side[..., parent] if node else torch.ones(30, 2).double()
        torch.testing.assert_close(reached[..., node], wanted)
    total = reached.sum(0)
    torch.testing.assert_close((reached * balanced).sum(0) / total, torch.zeros(2, 6).double())
    variance = (reached * balanced.square()).sum(0) / total
    assert (variance - 1).abs().max() < 1e-3
    paths = path_sums(*log_smooth_step_sides(balanced, 3.0)).exp()
    torch.testing.assert_close(
        paths[..., :2].sum(-1), reached[..., 3]
    )  # leaves 0 and 1 of 7 are below node 3


@pytest.mark.parametrize("balance", BALANCES)
def test_evaluation_and_a_forward_pass_without_a_step_move_no_statistics(balance):
    gate = balanced_gate(balance)
    before = statistics_of(gate)
    gate(skewed_rows(64))
    assert all(map(torch.equal, before, statistics_of(gate)))
    comet_moe.step(gate)
    moved = statistics_of(gate)
    assert not any(map(torch.equal, before, moved))
    gate.eval()(skewed_rows(64))
    comet_moe.step(gate)  # nothing was counted since the last step
    assert all(map(torch.equal, moved, statistics_of(gate)))


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_moves_statistics_as_no_checkpoint_does(balance, reentrant):
    x = skewed_rows(64).requires_grad_()
    moved = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        gate = balanced_gate(balance, gamma=5.0)
        for _ in range(2):
            if is_checkpointed:
                weights = checkpoint(lambda x, gate=gate: gate(x).weights, x, use_reentrant=reentrant)
            else:
                weights = gate(x).weights
            weights.square().sum().backward()
            comet_moe.step(gate)
        moved.append(statistics_of(gate))
    for plain, recomputed in zip(*moved, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_accumulated_batches_move_a_median_as_one_batch_does():
    x, moved = skewed_rows(64), []
    for parts in ([x], x.split(16)):
        torch.manual_seed(0)
        gate = balanced_gate("median", gamma=5.0)
        for part in parts:
            gate(part)
        comet_moe.step(gate)
        moved.append(statistics_of(gate))
    for whole, accumulated in zip(*moved, strict=True):
        torch.testing.assert_close(accumulated, whole)


def test_statistics_stay_in_float32_in_a_gate_of_half_precision():
    gate = balanced_gate("median").bfloat16()
    gate(skewed_rows(64).bfloat16())
    comet_moe.step(gate)
    assert all(values.dtype == torch.float32 for values in statistics_of(gate))
    assert gate.split_weight.dtype == torch.bfloat16


def test_the_width_goes_from_start_to_end_by_equal_factors():
    gate = CometGate(4, 8, gamma=(8.0, 0.5), gamma_steps=4)
    widths = []
    for _ in range(6):
        widths.append(gate.current_gamma)
        comet_moe.step(gate)
    assert widths == pytest.approx([8, 4, 2, 1, 0.5, 0.5])
    assert gate.split_weight.abs().max() <= 0.08
    other = CometGate(4, 8, gamma=(8.0, 0.5), gamma_steps=4)
    other.load_state_dict(gate.state_dict())
    assert other.current_gamma == 0.5


def test_all_paths_use_the_width_of_the_schedule():
    gate = CometGate(4, 64, k=2, gamma=(4.0, 1.0), gamma_steps=1)
    torch.nn.init.normal_(gate.split_weight)
    comet_moe.step(gate)
    fixed = CometGate(4, 64, k=2, gamma=1.0)
    fixed.load_state_dict(gate.state_dict(), strict=False)
    x = torch.randn(300, 4)
    torch.testing.assert_close(gate(x).weights, fixed(x).weights)
    with torch.no_grad():
        torch.testing.assert_close(gate.eval()(x).weights, fixed.eval()(x).weights)


@pytest.mark.parametrize("grad", [True, False])
def test_weights_sum_to_the_scale_and_statistics_stay(grad):
    plain, scaled = CometGate(6, 8, k=2), CometGate(6, 8, k=2, scale=2.5)
    scaled.load_state_dict(plain.state_dict())
    x = torch.randn(300, 6)
    with torch.set_grad_enabled(grad):
        routing, wanted = scaled.eval()(x), plain.eval()(x)
    torch.testing.assert_close(routing.weights, 2.5 * wanted.weights)
    numbers, same = routing.statistics(), wanted.statistics()
    for name in ("information", "effective_experts", "load_ratio", "experts_per_sample"):
        assert numbers[name] == pytest.approx(same[name], rel=1e-5, abs=1e-6)
    if grad:
        torch.testing.assert_close(routing.contributions.sum(-2), routing.weights)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"balance": "mean"}, r'balance must be None, "normalize" or "median", got \'mean\''),
        ({"scale": 0.0}, "scale must be a finite number above 0, got 0.0"),
        ({"gamma": (6, 0.3)}, r"gamma=\(6, 0.3\) needs gamma_steps"),
        ({"gamma": (6, 0), "gamma_steps": 3}, "gamma must be a finite number above 0, got 0"),
        ({"gamma": (6, 1, 2), "gamma_steps": 3}, "gamma must be two numbers"),
        ({"gamma": (6, 1), "gamma_steps": 0}, "gamma_steps must be an integer of at least 1, got 0"),
        ({"gamma": 1.0, "gamma_steps": 3}, r"gamma_steps is 3 and gamma the one number 1.0"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_sentence(settings, message):
    with pytest.raises(ValueError, match=message):
        CometGate(4, 8, **settings)
