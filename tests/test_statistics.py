"""Statistics of routing: formulas, exactness over batches, padding, all forms of a routing, the verdict."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from comet_moe import Routing
from comet_moe.gates import SoftmaxGate, SubsetGate, TopKGate
from comet_moe.routing import Pairs
from comet_moe.statistics import GroupStatistics, RoutingStatistics
from comet_moe.verdict import explain, verdict


def entropy(distribution):
    positive = distribution[distribution > 0]
    return float(-(positive * np.log(positive)).sum())


def by_definition(weights):
    """The formulas of the module, on float64 weights (B, n) of rows that sum to 1."""
    g = weights.double().numpy()
    mean, load = g.mean(0), (g > 1e-5).mean(0)
    sets = Counter(tuple(row) for row in (g > 1e-5).tolist())
    binary = [entropy(np.array([share, 1 - share])) for share in load]
    shares = np.array(list(sets.values())) / len(g)
    return {
        "selection_information": entropy(shares) if g.shape[1] <= 12 else np.mean(binary),
        "shared_experts": np.mean([[(a & b).sum() for a in g > 1e-5] for b in g > 1e-5]) / load.sum(),
        "experts_per_sample": (g > 1e-5).sum(1).mean(),
        "effective_experts": math.exp(entropy(mean)),
        "information": entropy(mean) - np.mean([entropy(row) for row in g]),
        "load_ratio": load.max() / load.mean(),
    }


def sparse_weights(rows, experts, k, seed):
    logits = torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed))
    kept, index = logits.topk(k, -1)
    return torch.zeros(rows, experts).scatter(-1, index, kept.softmax(-1))


@pytest.mark.parametrize(("k", "experts"), [(1, 7), (2, 7), (7, 7), (2, 12), (3, 13)])
@pytest.mark.parametrize("in_pairs", [False, True])
def test_statistics_equal_their_formulas(k, experts, in_pairs):
    weights = sparse_weights(50, experts, k, seed=k)
    routing = Routing(weights=weights)
    if in_pairs:
        routing = Routing.from_pairs(routing.pairs(), weights.shape[:1], experts)
    statistics = routing.statistics()
    assert statistics["selection_measure"] == ("sets" if experts <= 12 else "loads")
    for name, value in by_definition(weights).items():
        assert statistics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name  # weights are float32


def test_batches_of_any_size_give_the_statistics_of_all_rows():
    weights = sparse_weights(50, 7, 2, seed=0)
    statistics = RoutingStatistics()
    for batch in weights.split([1, 30, 19]):
        statistics.add(Routing(weights=batch))
    whole = Routing(weights=weights).statistics()
    for name, value in statistics.result().items():
        is_plain = value is None or isinstance(value, str)
        assert value == (whole[name] if is_plain else pytest.approx(whole[name], rel=1e-9)), name


def test_merging_equals_adding():
    parts = [Routing(weights=sparse_weights(9, 4, 2, seed)) for seed in range(2)]
    together, first, second = RoutingStatistics(), RoutingStatistics(), RoutingStatistics()
    for part, own in zip(parts, (first, second), strict=True):
        together.add(part)
        own.add(part)
    first.merge(second)
    assert first.result() == together.result()


def test_means_are_over_samples_not_batches():
    statistics = RoutingStatistics()
    statistics.add(Routing(weights=torch.tensor([[1.0, 0.0, 0.0]])))
    statistics.add(Routing(weights=torch.tensor([[0.5, 0.5, 0.0]] * 3)))
    result = statistics.result()
    assert result["experts_per_sample"] == 7 / 4
    assert result["share_of_samples"] == [1.0, 0.75, 0.0]
    assert result["share_of_weight"] == pytest.approx([2.5 / 4, 1.5 / 4, 0.0])
    assert result["dead_experts"] == [2]
    assert result["tree_entropy"] is None


def test_a_constant_gate_has_no_information_and_a_hard_balanced_one_has_log_n():
    constant = Routing(weights=torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 8)).statistics()
    balanced = Routing(weights=torch.eye(4).repeat(2, 1)).statistics()
    assert constant["information"] == pytest.approx(0, abs=1e-7)
    assert constant["effective_experts"] == pytest.approx(2)
    assert constant["load_ratio"] == 2
    assert balanced["information"] == pytest.approx(math.log(4))
    assert balanced["effective_experts"] == pytest.approx(4)
    assert balanced["load_ratio"] == 1


def test_padding_counts_nowhere():
    weights = sparse_weights(20, 5, 2, seed=1)
    selectors = torch.rand(20, 3, 5).softmax(-1)
    mask = torch.arange(20) % 3 != 0
    padded = Routing(weights=weights, selectors=selectors).masked(mask).statistics()
    alone = Routing(weights=weights[mask], selectors=selectors[mask]).statistics()
    torch.testing.assert_close(torch.tensor(padded.pop("leaf_share")), torch.tensor(alone.pop("leaf_share")))
    for name, value in alone.items():
        is_plain = value is None or isinstance(value, str)
        assert padded[name] == (value if is_plain else pytest.approx(value, rel=1e-6)), name


def test_rows_that_do_not_sum_to_one_count_by_their_shares():
    """As after ReLU or with unnormalised probabilities: a row twice as large says nothing else."""
    weights = sparse_weights(12, 5, 2, seed=2)
    scale = torch.linspace(0.1, 3.0, 12).unsqueeze(-1)
    plain, scaled = (Routing(weights=w).statistics() for w in (weights, weights * scale))
    for name in ("effective_experts", "information", "load_ratio"):
        assert scaled[name] == pytest.approx(plain[name], rel=1e-5), name


def test_rows_without_an_expert_have_no_part_in_the_information():
    weights = torch.cat((torch.eye(3), torch.zeros(3, 3)))
    statistics = Routing(weights=weights).statistics()
    assert statistics["information"] == pytest.approx(math.log(3))
    assert statistics["experts_per_sample"] == 0.5
    nothing = Routing(weights=torch.zeros(2, 3)).statistics()
    assert (nothing["effective_experts"], nothing["information"], nothing["load_ratio"]) == (0, 0, 1)


@pytest.mark.parametrize(
    ("weights", "word"),
    [
        (torch.full((8, 4), 0.25), "dense"),
        (torch.tensor([[0.9, 0.1, 0.0, 0.0]] * 8), "static"),
        # One sample in a hundred goes elsewhere, and the weights of the others are the same.
        (torch.cat((torch.eye(4)[:1].expand(99, 4), torch.eye(4)[1:2])), "blends"),
        # The border: 95 % of the samples share their experts, 94 % do not.
        (torch.cat((torch.eye(4)[:1].expand(95, 4), torch.eye(4)[1:2].expand(5, 4))), "blends"),
        (torch.cat((torch.eye(4)[:1].expand(94, 4), torch.eye(4)[1:2].expand(6, 4))), "routes"),
        # The same expert for every sample, and beside it one that differs.
        (0.5 * torch.eye(5)[0] + 0.5 * torch.eye(5)[1:].repeat(4, 1), "routes"),
        (torch.eye(4).repeat(4, 1), "routes"),
        # Two experts each, nearly all weight on one of them, which differs.
        (
            torch.tensor([[0.99, 0.01, 0.0, 0.0], [0.01, 0.0, 0.99, 0.0], [0.0, 0.0, 0.01, 0.99]] * 4),
            "routes",
        ),
        # The same two of four experts for every sample, with weights of their own.
        (torch.tensor([[0.8, 0.2, 0.0, 0.0], [0.2, 0.8, 0.0, 0.0]] * 4), "blends"),
        # All but one of four experts each, and each sample leaves out another one.
        ((1 - torch.eye(4)) * torch.rand(4, 4, generator=torch.Generator().manual_seed(0)), "routes"),
        (sparse_weights(50, 4, 2, seed=3), "routes"),
        (torch.ones(3, 1), "dense"),
    ],
)
def test_the_verdict_is_a_word_for_what_the_gate_does(weights, word):
    assert Routing(weights=weights).statistics()["verdict"] == word


@pytest.mark.parametrize(
    ("numbers", "word"),
    [
        ((8.0, 1.0, 0.5, 8), "dense"),
        ((7.99, 0.999, 0.5, 8), "blends"),
        ((2.0, 0.9, 0.5, 8), "routes"),
        ((2.0, 0.901, 0.5, 8), "blends"),
        ((2.0, 0.901, 0.01, 8), "blends"),
        ((2.0, 0.901, 0.0099, 8), "static"),
        ((1.0, 0.5, 0.0, 8), "routes"),
    ],
)
def test_the_borders_of_the_verdict(numbers, word):
    names = ("experts_per_sample", "shared_experts", "information", "num_choices")
    assert verdict(**dict(zip(names, numbers, strict=True))) == word


def test_experts_that_a_gate_cannot_choose_are_neither_dead_nor_part_of_its_load():
    gate = SubsetGate(SoftmaxGate(4, 2), experts=[5, 1], num_experts=6)
    found = gate(torch.randn(8, 4)).statistics()
    assert (found["num_choices"], found["load_ratio"], found["dead_experts"]) == (2, 1.0, [])
    one = SubsetGate(TopKGate(4, 2, k=1), experts=[5, 1], num_experts=6)
    with torch.no_grad():
        one.gate.bias[0] = 100.0
    found = one(torch.randn(8, 4)).statistics()
    assert (found["load_ratio"], found["dead_experts"]) == (2.0, [1])


def test_statistics_of_trees_are_of_all_batches_or_missing():
    """Evaluation of DSelect-k computes no selectors for a batch whose bits are all hard."""
    selectors = torch.full((1, 1, 2), 0.5)
    statistics = RoutingStatistics()
    statistics.add(Routing(weights=torch.tensor([[0.5, 0.5]]), selectors=selectors))
    assert statistics.result()["one_hot_trees"] == 0
    statistics.add(Routing(weights=torch.tensor([[1.0, 0.0]])))
    assert statistics.result()["one_hot_trees"] is None


def test_an_explanation_names_the_gates_and_what_to_try():
    one = explain("static", ["watched"], "information 0.000 nats")
    assert one.startswith("gate watched is static: every sample gets the same experts with the same")
    assert "information=1.0" in one
    several = explain("blends", ["layer 1", "layer 2"], "information 0.690 nats")
    assert several.startswith("gates layer 1, layer 2 blend: ")
    assert "load_balance=0.01" in several
    assert "\n" not in one + several


def group_shares(weights, groups, count):
    """By definition: the mean over the rows of each group of the weights divided by their sum."""
    g = weights.double().numpy()
    g = g / g.sum(1, keepdims=True)
    return [g[groups.numpy() == group].mean(0).tolist() for group in range(count)]


def test_shares_of_groups_are_exact_over_batches_and_forms_of_a_routing():
    weights = sparse_weights(60, 5, 2, seed=4) * torch.linspace(0.5, 2.0, 60).unsqueeze(-1)
    groups = torch.arange(60) % 3
    sample, expert = weights.nonzero(as_tuple=True)
    dense, pairs = GroupStatistics(3), GroupStatistics(3)
    for rows in torch.arange(60).split([1, 40, 19]):
        dense.add(Routing(weights=weights[rows]), groups[rows])
        inside = (sample >= rows[0]) & (sample <= rows[-1])
        of_batch = Pairs(sample[inside] - rows[0], expert[inside], weights[sample, expert][inside])
        pairs.add(Routing.from_pairs(of_batch, torch.Size([len(rows)]), 5), groups[rows])
    expected = group_shares(weights, groups, 3)
    for statistics in (dense, pairs):
        result = statistics.result()
        assert result["samples"] == [20, 20, 20]
        np.testing.assert_allclose(result["shares"], expected, rtol=1e-5)  # weights are float32


def test_rows_without_an_expert_and_padding_count_in_no_group():
    statistics = GroupStatistics(3)
    weights = torch.cat((torch.eye(2), torch.zeros(1, 2), torch.eye(2)))
    mask = torch.tensor([True, True, True, True, False])
    statistics.add(Routing(weights=weights).masked(mask), torch.tensor([0, 0, 0, 1, 1]))
    assert statistics.result() == {"samples": [2, 1, 0], "shares": [[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]]}
