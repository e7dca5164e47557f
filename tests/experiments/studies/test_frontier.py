"""Mixtures against dense networks at their own operations."""

import pytest
from made_studies import made_study, trial
from scipy.stats import ttest_ind

from comet_moe.experiments.studies.frontier import AT_ITS_COST, frontier, loss_at
from comet_moe.experiments.studies.tables import compare_gates

SPREAD = (-0.1, 0.0, 0.1)


def rows_of(networks):
    """The rows of a study of three seeds with NAME=(test loss, operations)."""
    lines = [
        trial(name, seed, loss + change, loss + change, flops_per_sample=operations)
        for name, (loss, operations) in networks.items()
        for seed, change in enumerate(SPREAD)
    ]
    return {row["gate"]: row for row in compare_gates(made_study(lines, kind="ablation"))}


DENSE = {"dense-0.5x": (6.0, 100.0), "dense": (5.0, 200.0), "dense-2x": (4.0, 400.0)}


def p_below(first, second):
    """Welch's test of two samples around these means."""
    samples = [[loss + change for change in SPREAD] for loss in (first, second)]
    return ttest_ind(*samples, equal_var=False, alternative="less").pvalue


def test_the_frontier_is_linear_in_the_logarithm_of_the_operations():
    points = frontier(list(rows_of(DENSE | {"dense-per-task": (1.0, 50.0), "topk": (1.0, 300.0)}).values()))
    assert [row["gate"] for row in points] == list(DENSE)
    loss, shares = loss_at(points, 200.0 * 2**0.5)
    assert loss.mean == pytest.approx(4.5)
    assert dict(shares) == {"dense": pytest.approx(0.5), "dense-2x": pytest.approx(0.5)}
    assert loss_at(points, 400.0)[0].mean == pytest.approx(4.0)
    assert loss_at(points, 99.0) is None
    assert loss_at(points, 401.0) is None


def test_a_mixture_is_compared_with_dense_networks_at_its_own_operations():
    row = rows_of(DENSE | {"topk": (4.45, 200.0 * 2**0.5)})["topk"]
    # Below all dense networks that were trained at no more operations, and not below the line.
    assert (row["dense_rival"], row["dense_loss"]) == (AT_ITS_COST, pytest.approx(4.5))
    assert row["p_dense"] > p_below(4.45, 5.0)
    assert row["significant_dense"] is False


def test_a_cheaper_dense_network_that_is_better_counts():
    networks = {"dense-0.5x": (4.0, 100.0), "dense": (6.0, 200.0), "topk": (5.0, 200.0)}
    row = rows_of(networks)["topk"]
    assert (row["dense_rival"], row["dense_loss"]) == ("dense-0.5x", 4.0)
    assert row["p_dense"] == pytest.approx(p_below(5.0, 4.0))


def test_one_expert_per_task_counts_as_a_dense_network_off_the_line():
    row = rows_of(DENSE | {"dense-per-task": (3.0, 200.0), "topk": (3.5, 200.0)})["topk"]
    assert (row["dense_rival"], row["p_dense"]) == ("dense-per-task", pytest.approx(p_below(3.5, 3.0)))
    per_task = rows_of(DENSE | {"dense-per-task": (3.0, 200.0)})["dense-per-task"]
    assert (per_task["dense_rival"], per_task["significant_dense"]) == ("dense", True)


@pytest.mark.parametrize(("operations", "comparable"), [(419.0, True), (421.0, False)])
def test_beyond_the_widest_dense_network_nothing_is_significant(operations, comparable):
    row = rows_of(DENSE | {"topk": (1.0, operations)})["topk"]
    assert row["p_dense"] < 0.001
    assert row["significant_dense"] is comparable
    assert row["dense_reaches"] == operations / 400


def test_a_mixture_that_is_cheaper_than_all_has_to_be_below_the_cheapest():
    row = rows_of(DENSE | {"topk": (5.5, 50.0)})["topk"]
    assert (row["dense_rival"], row["p_dense"]) == ("dense-0.5x", pytest.approx(p_below(5.5, 6.0)))


def test_only_the_mixture_with_the_lowest_validation_loss_is_tested_without_correction():
    dense = {"dense": (5.0, 200.0)}
    mixtures = {"topk": (4.8, 200.0), "comet": (4.9, 200.0), "softmax": (4.95, 200.0)}
    rows = rows_of(dense | mixtures)
    alone = p_below(4.8, 5.0)
    assert rows["topk"]["p_dense"] == pytest.approx(alone)
    assert rows["comet"]["p_dense"] == pytest.approx(2 * p_below(4.9, 5.0))
    assert rows["softmax"]["p_dense"] == pytest.approx(max(p_below(4.95, 5.0), 2 * p_below(4.9, 5.0)))


def test_there_is_no_test_without_dense_or_with_one_seed():
    assert rows_of({"topk": (4.0, 200.0)})["topk"]["p_dense"] is None
    lines = [trial(gate, 0, 1.0, 1.0) for gate in ("dense", "topk")]
    (_, row) = compare_gates(made_study(lines, kind="ablation"))
    assert (row["p_dense"], row["significant_dense"], row["dense_rival"]) == (None, None, "dense")
