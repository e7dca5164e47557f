"""The tuning-reduction factor, on curves that can be read by hand."""

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_studies import made_study, random_trials, trial

from comet_moe.analysis.budget import (
    best_rank_probabilities,
    compute_speedups,
    count_needed_trials,
    default_pairs,
    expected_losses,
    parse_pair,
    select_pairs,
)
from comet_moe.exceptions import StudyError


def lines(gate, losses):
    """Trials whose validation loss is their test loss."""
    return [trial(gate, at, float(loss), float(loss)) for at, loss in enumerate(losses)]


def at_budget(rows, budget):
    (row,) = (row for row in rows if row["budget"] == budget)
    return row


def test_a_factor_worked_by_hand():
    # Rival: losses 0, 1, ..., 9. Best of s of N=10: (N+1)/(s+1) - 1 = 11/(s+1) - 1, so 5/6 at s=5.
    # Gate: half as much, (11/(s+1) - 1) / 2 <= 5/6 from s+1 >= 4.125 on, so s=4.
    study = made_study([*lines("comet", np.arange(10) / 2), *lines("topk", np.arange(10))])
    row = at_budget(compute_speedups(study, [("comet", "topk")], repeats=50), 5)
    assert row["loss"] == pytest.approx(5 / 6)
    assert (row["baseline_trials"], row["gate_trials"], row["speedup"]) == (5, 4, 1.25)
    # At s=10 both are 0: the gate, whose losses are lower above that, gets there with as many.
    row = at_budget(compute_speedups(study, [("comet", "topk")], repeats=50), 10)
    assert (row["loss"], row["speedup"]) == (pytest.approx(0, abs=1e-12), 1)


def test_a_gate_that_is_better_with_one_trial_has_the_whole_budget_as_factor():
    study = made_study([*lines("comet", [1, 1, 1, 1, 1]), *lines("topk", [2, 3, 4, 5, 6])])
    rows = compute_speedups(study, [("comet", "topk")], repeats=100)
    assert [row["budget"] for row in rows] == [1, 2, 5]
    assert [row["speedup"] for row in rows] == [1, 2, 5]
    # Any resample of the rival is above 1; it may hold its best trial more than once and need fewer draws.
    assert all(row["gate_trials"] == 1 and row["not_reached"] == 0 for row in rows)
    assert rows[-1]["speedup_low"] >= 1
    assert rows[-1]["speedup_high"] <= 5


def test_a_gate_that_never_gets_there_is_said_to():
    study = made_study([*lines("comet", [2, 3, 4, 5, 6]), *lines("topk", [1, 1, 1, 1, 1])])
    for row in compute_speedups(study, [("comet", "topk")], repeats=100):
        assert row["gate_trials"] is row["speedup"] is row["speedup_low"] is row["speedup_high"] is None
        assert (row["baseline_trials"], row["not_reached"]) == (1, 1)


def test_where_some_resamples_never_get_there_the_interval_is_open_below():
    study = made_study([*lines("comet", np.arange(20)), *lines("topk", np.arange(20) + 0.5)])
    row = at_budget(compute_speedups(study, [("comet", "topk")], repeats=400), 20)
    assert row["speedup"] == pytest.approx(20 / row["gate_trials"])
    assert 0.025 < row["not_reached"] < 0.975
    assert row["speedup_low"] is None
    assert row["speedup_high"] > 1


@given(st.lists(st.tuples(st.floats(1, 9), st.floats(1, 9)), min_size=1, max_size=30))
def test_a_gate_against_itself_has_factor_one_even_where_its_curve_rises(pairs):
    study = made_study([trial("comet", at, v, t) for at, (v, t) in enumerate(pairs)])
    rows = compute_speedups(study, [("comet", "comet")], repeats=2)
    assert [row["speedup"] for row in rows] == [1] * len(rows)


@pytest.mark.parametrize("loss", [0.1, 17.3, 52.034, 1234.5678])
def test_equal_losses_are_reached_whatever_their_sums_round_to(loss):
    study = made_study([*lines("comet", [loss] * 23), *lines("topk", [loss] * 60)])
    for row in compute_speedups(study, [("comet", "topk")], repeats=5):
        assert (row["baseline_trials"], row["gate_trials"], row["not_reached"]) == (1, 1, 0)


def test_a_rival_that_gets_worse_is_measured_by_what_it_needs():
    # The best validation loss has a bad test loss: with all five trials the rival is back at 5.
    rising = [trial("topk", at, float(at), loss) for at, loss in enumerate([5.0, 1.0, 1.0, 1.0, 6.0])]
    study = made_study([*rising, *lines("comet", [3, 3, 3, 3, 3])])
    curve = expected_losses(np.array([[5.0, 1, 1, 1, 6]]))[0]
    assert curve[4] > curve[0]
    row = at_budget(compute_speedups(study, [("comet", "topk")], repeats=20), 5)
    assert (row["loss"], row["baseline_trials"], row["gate_trials"], row["speedup"]) == (5, 1, 1, 1)


@given(st.integers(1, 40), st.integers(0, 10**6))
def test_fewest_trials_are_those_of_a_plain_search(count, seed):
    random = np.random.default_rng(seed)
    gate, rival = (expected_losses(random.normal(size=(3, count))) for _ in range(2))
    size = rival.shape[1]
    for at, found in enumerate(count_needed_trials(gate, rival, size)):
        for curve, fewest in zip((gate[at], rival[at]), found, strict=True):
            reaching = [
                s for s, loss in enumerate(curve, 1) if loss <= rival[at, -1] + 1e-9 * abs(rival[at, -1])
            ]
            assert fewest == (reaching[0] if reaching else 0)


def test_the_expected_curve_has_every_budget_up_to_the_last_of_the_grid():
    losses = np.random.default_rng(0).normal(size=(4, 63))
    curve = expected_losses(losses)
    assert curve.shape == (4, 60)
    np.testing.assert_allclose(
        curve[:, 6], losses @ best_rank_probabilities(np.array([7]), 63)[0], rtol=1e-12
    )


def test_seeds_decide_the_interval_and_nothing_else():
    study = made_study(random_trials(["topk", "comet"], 30))
    first, again, other = (
        compute_speedups(study, [("comet", "topk")], repeats=99, seed=s) for s in (0, 0, 1)
    )
    assert first == again != other
    assert [row["speedup"] for row in first] == [row["speedup"] for row in other]


def test_how_often_the_interval_holds_the_true_factor():
    """Less often than 95 % once the budget is a large part of the trials; docs/statistics.md says so."""
    random = np.random.default_rng(0)
    simulations, held = 100, {5: 0, 30: 0, 60: 0}
    for seed in range(simulations):
        # Both gates draw from the same distribution: the true factor is 1.
        both = [line for gate in ("comet", "topk") for line in lines(gate, random.normal(size=60))]
        for row in compute_speedups(made_study(both), [("comet", "topk")], repeats=300, seed=seed):
            if row["budget"] in held:
                held[row["budget"]] += (row["speedup_low"] or 0) <= 1 <= (row["speedup_high"] or 0)
    for budget, share in {5: 0.94, 30: 0.88, 60: 0.86}.items():  # of 400 simulations elsewhere
        error = sqrt(share * (1 - share) * (1 / simulations + 1 / 400))
        assert held[budget] / simulations == pytest.approx(share, abs=4 * error)


def test_pairs_are_the_papers_unless_named():
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
    found = select_pairs([study, other], [parse_pair("comet:topk"), parse_pair("comet+:softmax")])
    assert [pairs for _, pairs in found] == [[("comet", "topk"), ("comet+", "softmax")], [("comet", "topk")]]
    with pytest.raises(StudyError, match="both dselect and topk: choose from comet, comet\\+, hash"):
        select_pairs([study, other], [("dselect", "topk")])
    with pytest.raises(StudyError, match="repeats must be at least 2 to have an interval, got 1"):
        compute_speedups(study, [("comet", "topk")], repeats=1)


@pytest.mark.parametrize("text", ["comet", "comet:", ":topk", "a:b:c", ""])
def test_what_is_no_pair_is_refused(text):
    with pytest.raises(StudyError, match="a pair has the form GATE:BASELINE"):
        parse_pair(text)
