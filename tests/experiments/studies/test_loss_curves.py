"""Test loss by number of trials: closed form against enumeration, random draws against the closed form."""

from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_studies import GATES, made_study, random_trials, trial, waiting
from scipy.stats import chisquare

from comet_moe.exceptions import StudyError
from comet_moe.experiments.studies.loss_by_trials import (
    best_rank_probabilities,
    budget_grid,
    compute_loss_curves,
    draw_best_ranks,
    ranked_test_losses,
)


def test_budgets_are_those_of_the_paper_up_to_the_number_of_trials():
    assert budget_grid(500) == [1, 2, *range(5, 251, 5)]
    assert budget_grid(60) == [1, 2, *range(5, 61, 5)]
    assert budget_grid(7) == [1, 2, 5]
    assert budget_grid(1) == [1]


@pytest.mark.parametrize("trials", [1, 2, 9, 60, 500])
def test_probability_of_a_rank_is_a_ratio_of_binomials(trials):
    sizes = np.array(budget_grid(trials))
    exact = [
        [float(Fraction(comb(trials - r, s - 1), comb(trials, s))) for r in range(1, trials + 1)]
        for s in sizes
    ]
    probabilities = best_rank_probabilities(sizes, trials)
    # A product of up to 500 quotients is exact to 500 roundings; far tails below 1e-300 may vanish.
    np.testing.assert_allclose(probabilities, exact, rtol=500 * 2.3e-16, atol=1e-300)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-12)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 50)), min_size=1, max_size=7), st.integers(0, 2))
def test_expected_loss_is_the_mean_over_all_draws(pairs, failed):
    """All subsets are equally likely; ties go by index; only failed trials count as the worst test loss."""
    lines = [trial("comet", at, float(v), float(t)) for at, (v, t) in enumerate(pairs)]
    lines += [trial("comet", len(pairs) + at, None, None) for at in range(failed)]
    worst = max(test for _, test in pairs)

    def outcome(drawn):
        ranked = [(pairs[at][0], at) for at in drawn if at < len(pairs)]
        return pairs[min(ranked)[1]][1] if ranked else worst

    for row in compute_loss_curves(made_study(lines), repeats=2):
        draws = list(combinations(range(len(lines)), row["budget"]))
        assert row["expected"] == pytest.approx(np.mean([outcome(drawn) for drawn in draws]), abs=1e-9)
        empty = sum(min(drawn) >= len(pairs) for drawn in draws) / len(draws)
        assert row["all_failed_probability"] == pytest.approx(empty, abs=1e-12)


def test_mean_of_random_draws_agrees_with_the_expected_loss():
    for row in compute_loss_curves(made_study(random_trials(GATES, 60, failed=6)), repeats=4000, seed=1):
        # 84 rows: beyond four and a half standard errors lies one in 150,000, and nothing at no error.
        assert abs(row["mean"] - row["expected"]) <= 4.5 * row["mean_se"] + 1e-9
        assert row["low"] <= row["mean"] <= row["high"] or row["mean_se"] < 0.01


def test_drawn_ranks_follow_the_closed_form_probabilities():
    sizes, repeats = np.array([1, 2, 5, 10]), 20000
    drawn = draw_best_ranks(sizes, 12, repeats, np.random.default_rng(0))
    for at, probabilities in enumerate(best_rank_probabilities(sizes, 12)):
        possible = probabilities > 0
        counts = np.bincount(drawn[:, at], minlength=12)
        assert counts[~possible].sum() == 0
        assert chisquare(counts[possible], repeats * probabilities[possible]).pvalue > 1e-4


def test_low_and_high_are_the_5_and_95_percent_quantiles_of_the_draws():
    trials = [trial("comet", at, float(at), float(at)) for at in range(100)]
    row = compute_loss_curves(made_study(trials), repeats=20000)[0]
    # One trial of 0..99: the 5th and 95th percentile, to four standard errors of a quantile, 0.15 each.
    assert (row["low"], row["high"]) == (pytest.approx(4.5, abs=0.7), pytest.approx(94.5, abs=0.7))


@given(st.lists(st.floats(1, 100), min_size=1, max_size=40), st.integers(0, 5))
def test_more_trials_never_increase_the_loss_if_validation_equals_test(losses, failed):
    lines = [trial("comet", at, loss, loss) for at, loss in enumerate(losses)]
    lines += [trial("comet", len(losses) + at, None, None) for at in range(failed)]
    rows = compute_loss_curves(made_study(lines), repeats=20)
    for name in ("expected", "mean", "low", "high"):
        curve = [row[name] for row in rows]
        assert np.all(np.diff(curve) <= 1e-9)
    if rows[-1]["budget"] == len(lines):
        assert rows[-1]["expected"] == pytest.approx(min(losses))


@settings(max_examples=15)
@given(st.randoms(use_true_random=False))
def test_curves_do_not_depend_on_the_order_of_trials_or_on_other_gates(random):
    lines = list(random_trials(["topk", "comet"], 12, failed=2))
    alone = [line for line in lines if line["gate"] == "comet"]
    expected = compute_loss_curves(made_study(alone), repeats=50, seed=7)
    shuffled = compute_loss_curves(made_study(random.sample(lines, len(lines))), repeats=50, seed=7)
    assert [row for row in shuffled if row["gate"] == "comet"] == expected


def test_unfinished_trials_are_ignored():
    lines = list(random_trials(["comet"], 10))
    more = [*lines, *(waiting("comet", at) for at in range(10, 20))]
    assert compute_loss_curves(made_study(more)) == compute_loss_curves(made_study(lines))


def test_a_gate_without_a_complete_trial_has_no_curve():
    study = made_study([*random_trials(["comet"], 3), trial("topk", 0, None, None)])
    assert {row["gate"] for row in compute_loss_curves(study)} == {"comet"}
    assert study.gates_with_results == ["comet"]
    with pytest.raises(StudyError, match="topk of made has no complete trial"):
        ranked_test_losses(study, "topk")
    with pytest.raises(StudyError, match="repeats must be at least 2 to have a spread, got 1"):
        compute_loss_curves(study, repeats=1)


def test_information_is_that_of_the_trial_that_is_kept():
    """Information 0, 1 and 2 by rank: the best of two of three is the first with 2/3, the second with 1/3."""
    gate = {"experts": 8, "experts_per_sample": 1.0, "load_ratio": 1.0, "dead_experts": 0}

    def routing(value):
        return {"a": {**gate, "information": value, "effective_experts": 1 + value}}

    lines = [trial("comet", at, float(at), 5.0, routing=routing(at)) for at in range(3)]
    by_budget = {row["budget"]: row for row in compute_loss_curves(made_study(lines), repeats=2)}
    assert by_budget[1]["information"] == pytest.approx(1)
    assert by_budget[2]["information"] == pytest.approx(1 / 3)
    assert by_budget[2]["effective_experts"] == pytest.approx(4 / 3)
    failed = trial("comet", 3, None, None)
    by_budget = {row["budget"]: row for row in compute_loss_curves(made_study([*lines, failed]), repeats=2)}
    assert by_budget[1]["information"] == pytest.approx(1)  # a draw that failed has none
    unrecorded = made_study([*lines[:2], trial("comet", 2, 2.0, 5.0, routing={})])
    assert all(row["information"] is None for row in compute_loss_curves(unrecorded, repeats=2))
