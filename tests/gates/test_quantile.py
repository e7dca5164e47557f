"""Quantile balancing of TopKGate: the bias is the quantile of the margins, and evens out the loads."""

import pytest
import torch

import comet_moe
from comet_moe.gates import TopKGate
from comet_moe.gates.quantile import BINS, WIDEST, count_margins, move_to_quantile

B, N = 4000, 8


def skewed_scores(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(B, N, generator=generator) + torch.linspace(0, 3, N)).softmax(-1)


def loads(scores, k):
    return torch.zeros(N).scatter_add(0, scores.topk(k).indices.flatten(), torch.ones(B * k))


@pytest.mark.parametrize("k", [1, 3])
def test_the_histogram_gives_the_quantile_of_the_margins(k):
    scores = skewed_scores()
    histogram, bias = torch.zeros(N, BINS, dtype=torch.int64), torch.zeros(N)
    count_margins(histogram, scores, k, None)
    assert histogram.sum(-1).tolist() == [B] * N
    move_to_quantile(bias, histogram, k, None)
    threshold = scores.topk(k + 1).values[:, -2:].mean(-1, keepdim=True)
    exact = (threshold - scores).quantile(k / N, dim=0)
    # A bin at margin m is WIDEST · 3 u² · 2 / BINS wide, u the cube root of m / WIDEST.
    width = WIDEST * 3 * (exact.abs() / WIDEST) ** (2 / 3) * 2 / BINS
    assert bool(((bias - (exact - exact.mean())).abs() <= width + width.mean() + 1e-5).all())


@pytest.mark.parametrize("k", [1, 3])
def test_a_skewed_batch_is_even_after_a_few_steps(k):
    scores, bias = skewed_scores(), torch.zeros(N)
    assert loads(scores, k).max() > 2 * B * k / N
    for _ in range(20):
        histogram = torch.zeros(N, BINS, dtype=torch.int64)
        count_margins(histogram, scores + bias, k, None)
        move_to_quantile(bias, histogram, k, None)
        assert abs(bias.mean()) < 1e-6
    assert loads(scores + bias, k).max() < 1.02 * B * k / N


def balanced_gate(**settings):
    torch.manual_seed(0)
    gate = TopKGate(N, N, k=2, balance="quantile", **settings)
    with torch.no_grad():
        gate.bias.copy_(torch.linspace(0, 3, N))
    return gate


def test_only_training_passes_and_rows_that_are_not_padding_count():
    gate, x = balanced_gate(), torch.randn(6, N)
    gate.eval()(x)
    assert not gate.margins.any()
    gate.train()(x, mask=torch.tensor([True] * 4 + [False] * 2))
    assert gate.margins.sum(-1).tolist() == [4] * N
    comet_moe.step(gate)
    assert not gate.margins.any()
    moved = gate.balance_bias.clone()
    assert moved.any()
    comet_moe.step(gate)  # no rows since the last step
    assert torch.equal(gate.balance_bias, moved - moved.mean())
    assert gate.state_dict().keys() == {"weight", "bias", "balance_bias"}


def test_passes_between_two_steps_count_as_one_batch():
    whole, parts, x = balanced_gate(), balanced_gate(), torch.randn(40, N)
    whole(x)
    for part in x.split(10):
        parts(part)
    for gate in (whole, parts):
        comet_moe.step(gate)
    assert torch.equal(whole.balance_bias, parts.balance_bias)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_choice_is_even_and_the_bias_is_no_part_of_a_weight(score):
    gate = balanced_gate(score=score)
    for seed in range(20):
        gate(torch.randn(B, N, generator=torch.Generator().manual_seed(seed)))
        comet_moe.step(gate)
    x = torch.randn(B, N, generator=torch.Generator().manual_seed(99))
    routing = gate.eval()(x)
    # A share of 1/4 of 4,000 other rows: 1.15 is five standard deviations of a load, plus those of the bias.
    assert routing.statistics()["load_ratio"] < 1.15
    scores = routing.logits.softmax(-1) if score == "softmax" else routing.logits.sigmoid()
    chosen = scores * (routing.weights != 0)
    torch.testing.assert_close(routing.weights, chosen / chosen.sum(-1, keepdim=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"balance": "sign"}, 'balance must be "quantile" or None'),
        ({"balance": "quantile", "bias_update": 0.1}, "set bias_update, 0.1, to 0"),
        ({"balance": "quantile", "groups": 4, "top_groups": 2}, "top_groups=2 of 4 groups"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TopKGate(N, N, k=2, **settings)
