"""Speedup: how many times fewer trials a gate needs than a baseline, on curves computed by hand."""

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_studies import made_study, random_trials, trial

from comet_moe.exceptions import StudyError
from comet_moe.experiments.studies.loss_by_trials import (
    best_rank_probabilities,
    compute_speedups,
    count_needed_trials,
    default_pairs,
    expected_losses,
    parse_pair,
    select_pairs,
)


def lines(gate, losses):
    """Trials whose validation loss is their test loss."""
    return [trial(gate, at, float(loss), float(loss)) for at, loss in enumerate(losses)]


def at_budget(rows, budget):
    (row,) = (row for row in rows if row["budget"] == budget)
    return row


def test_speedup_of_an_example_computed_by_hand():
    # Baseline: losses 0, 1, ..., 9. Best of s of N=10: (N+1)/(s+1) - 1 = 11/(s+1) - 1, so 5/6 at s=5.
    # Gate: half as much, (11/(s+1) - 1) / 2 <= 5/6 from s+1 >= 4.125 on, so s=4.
    study = made_study([*lines("comet", np.arange(10) / 2), *lines("topk", np.arange(10))])
    row = at_budget(compute_speedups(study, [("comet", "topk")], repeats=50), 5)
    assert row["loss"] == pytest.approx(5 / 6)
    assert (row["baseline_trials"], row["gate_trials"], row["speedup"]) == (5, 4, 1.25)
    # At s=10 both are 0, and the gate needs all its trials for that too.
    row = at_budget(compute_speedups(study, [("comet", "topk")], repeats=50), 10)
    assert (row["loss"], row["speedup"]) == (pytest.approx(0, abs=1e-12), 1)


def test_speedup_equals_the_budget_if_one_trial_of_the_gate_is_enough():
    study = made_study([*lines("comet", [1, 1, 1, 1, 1]), *lines("topk", [2, 3, 4, 5, 6])])
    rows = compute_speedups(study, [("comet", "topk")], repeats=100)
    assert [row["budget"] for row in rows] == [1, 2, 5]
    assert [row["speedup"] for row in rows] == [1, 2, 5]
    # Any resample of the baseline is above 1; it may contain its best trial twice and need fewer draws.
    assert all(row["gate_trials"] == 1 and row["not_reached"] == 0 for row in rows)
    assert rows[-1]["speedup_low"] >= 1
    assert rows[-1]["speedup_high"] <= 5


def test_there_is_no_speedup_if_the_gate_does_not_reach_the_loss():
    study = made_study([*lines("comet", [2, 3, 4, 5, 6]), *lines("topk", [1, 1, 1, 1, 1])])
    for row in compute_speedups(study, [("comet", "topk")], repeats=100):
        assert row["gate_trials"] is row["speedup"] is row["speedup_low"] is row["speedup_high"] is None
        assert (row["baseline_trials"], row["not_reached"]) == (1, 1)


def test_interval_has_no_lower_end_if_some_resamples_do_not_reach_the_loss():
    study = made_study([*lines("comet", np.arange(20)), *lines("topk", np.arange(20) + 0.5)])
    row = at_budget(compute_speedups(study, [("comet", "topk")], repeats=400), 20)
    assert row["speedup"] == pytest.approx(20 / row["gate_trials"])
    assert 0.025 < row["not_reached"] < 0.975
    assert row["speedup_low"] is None
    assert row["speedup_high"] > 1


@given(st.lists(st.tuples(st.floats(1, 9), st.floats(1, 9)), min_size=1, max_size=30))
def test_speedup_of_a_gate_over_itself_is_one_even_if_its_curve_rises(pairs):
    study = made_study([trial("comet", at, v, t) for at, (v, t) in enumerate(pairs)])
    rows = compute_speedups(study, [("comet", "comet")], repeats=2)
    assert [row["speedup"] for row in rows] == [1] * len(rows)


@pytest.mark.parametrize("loss", [0.1, 17.3, 52.034, 1234.5678])
def test_equal_losses_are_reached_in_spite_of_rounding(loss):
    study = made_study([*lines("comet", [loss] * 23), *lines("topk", [loss] * 60)])
    for row in compute_speedups(study, [("comet", "topk")], repeats=5):
        assert (row["baseline_trials"], row["gate_trials"], row["not_reached"]) == (1, 1, 0)


def test_a_baseline_whose_curve_rises_is_measured_by_its_fewest_trials():
    # The best validation loss has a bad test loss: with all five trials the baseline is back at 5.
    rising = [trial("topk", at, float(at), loss) for at, loss in enumerate([5.0, 1.0, 1.0, 1.0, 6.0])]
    study = made_study([*rising, *lines("comet", [3, 3, 3, 3, 3])])
    curve = expected_losses(np.array([[5.0, 1, 1, 1, 6]]))[0]
    assert curve[4] > curve[0]
    row = at_budget(compute_speedups(study, [("comet", "topk")], repeats=20), 5)
    assert (row["loss"], row["baseline_trials"], row["gate_trials"], row["speedup"]) == (5, 1, 1, 1)


@given(st.integers(1, 40), st.integers(0, 10**6))
def test_needed_trials_agree_with_a_plain_search(count, seed):
    random = np.random.default_rng(seed)
    gate, baseline = (expected_losses(random.normal(size=(3, count))) for _ in range(2))
    budget = baseline.shape[1]
    for at, needed in enumerate(count_needed_trials(gate, baseline, budget)):
        for curve, fewest in zip((gate[at], baseline[at]), needed, strict=True):
            reaching = [
                s
                for s, loss in enumerate(curve, 1)
                if loss <= baseline[at, -1] + 1e-9 * abs(baseline[at, -1])
            ]
            assert fewest == (reaching[0] if reaching else 0)


def test_expected_losses_have_every_budget_up_to_the_last_of_the_grid():
    losses = np.random.default_rng(0).normal(size=(4, 63))
    curve = expected_losses(losses)
    assert curve.shape == (4, 60)
    np.testing.assert_allclose(
        curve[:, 6], losses @ best_rank_probabilities(np.array([7]), 63)[0], rtol=1e-12
    )


def test_seed_changes_the_interval_and_nothing_else():
    study = made_study(random_trials(["topk", "comet"], 30))
    first, again, other = (
        compute_speedups(study, [("comet", "topk")], repeats=99, seed=s) for s in (0, 0, 1)
    )
    assert first == again != other
    assert [row["speedup"] for row in first] == [row["speedup"] for row in other]


@pytest.mark.slow
def test_coverage_of_the_interval():
    """Below 95 % once the budget is a large part of the trials, as docs/statistics.md says."""
    random = np.random.default_rng(0)
    simulations, held = 100, {5: 0, 30: 0, 60: 0}
    for seed in range(simulations):
        # Both gates draw from the same distribution: the true speedup is 1.
        both = [line for gate in ("comet", "topk") for line in lines(gate, random.normal(size=60))]
        for row in compute_speedups(made_study(both), [("comet", "topk")], repeats=300, seed=seed):
            if row["budget"] in held:
                held[row["budget"]] += (row["speedup_low"] or 0) <= 1 <= (row["speedup_high"] or 0)
    for budget, share in {5: 0.94, 30: 0.88, 60: 0.86}.items():  # of 400 simulations elsewhere
        error = sqrt(share * (1 - share) * (1 / simulations + 1 / 400))
        assert held[budget] / simulations == pytest.approx(share, abs=4 * error)


def test_default_pairs_are_those_of_the_paper():
    study = made_study(random_trials(["hash", "hash+", "topk", "comet", "comet+", "softmax"], 3))
    assert default_pairs(study) == [
        ("hash+", "hash"),
        ("comet+", "comet"),
        ("comet", "hash"),
        ("comet", "topk"),
        ("comet+", "hash"),
        ("comet+", "topk"),
    ]
    other = made_study(random_trials(["topk", "comet"], 3))
    selected = select_pairs([study, other], [parse_pair("comet:topk"), parse_pair("comet+:softmax")])
    assert [pairs for _, pairs in selected] == [
        [("comet", "topk"), ("comet+", "softmax")],
        [("comet", "topk")],
    ]
    with pytest.raises(StudyError, match="both dselect and topk: choose from comet, comet\\+, hash"):
        select_pairs([study, other], [("dselect", "topk")])
    with pytest.raises(StudyError, match="repeats must be at least 2 to have an interval, got 1"):
        compute_speedups(study, [("comet", "topk")], repeats=1)


@pytest.mark.parametrize("text", ["comet", "comet:", ":topk", "a:b:c", ""])
def test_a_malformed_pair_is_refused(text):
    with pytest.raises(StudyError, match="a pair has the form GATE:BASELINE"):
        parse_pair(text)
