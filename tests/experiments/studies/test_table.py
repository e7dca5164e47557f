"""The comparison of gates, against numpy and scipy on the lines of trials.jsonl."""

from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_studies import GATES, made_study, random_trials, trial, waiting
from scipy.stats import sem, ttest_ind

from comet_moe.exceptions import StudyError
from comet_moe.experiments.studies.tables import compare_gates


def rows_of(lines, top=5.0, **changes):
    return {row["gate"]: row for row in compare_gates(made_study(lines, **changes), top)}


def best(trials, gate, count):
    """The ``count`` complete lines of ``gate`` with the lowest validation loss, by plain sorting."""
    lines = [line for line in trials if line["gate"] == gate and line["status"] == "complete"]
    return sorted(lines, key=lambda line: (line["validation_loss"], line["index"]))[:count]


def losses(lines):
    return [line["test_loss"] for line in lines]


@pytest.mark.parametrize("top", [5, 20, 100])
def test_means_are_over_the_best_share_by_validation_loss(top):
    trials = list(random_trials(GATES, 60, failed=4))
    rows = rows_of(trials, top)
    assert list(rows) == GATES
    for gate, row in rows.items():
        used = best(trials, gate, ceil(60 * top / 100))
        assert row["trials_used"] == len(used) == min(ceil(60 * top / 100), 56)
        assert (row["trials_planned"], row["trials_complete"], row["trials_failed"]) == (60, 56, 4)
        assert row["test_loss_mean"] == pytest.approx(np.mean(losses(used)), rel=1e-12)
        assert row["test_loss_se"] == pytest.approx(sem(losses(used)), rel=1e-9)
        for name in ("validation_loss", "experts_per_sample", "flops_per_sample"):
            assert row[f"{name}_mean"] == pytest.approx(np.mean([line[name] for line in used]), rel=1e-12)
        assert row["experts_per_sample_se"] == pytest.approx(
            sem([line["experts_per_sample"] for line in used])
        )


@pytest.mark.parametrize(
    ("planned", "top", "used"), [(500, 5, 25), (60, 5, 3), (61, 5, 4), (1, 5, 1), (10, 30, 3)]
)
def test_number_of_used_trials_is_rounded_up(planned, top, used):
    assert rows_of(random_trials(["comet"], planned), top)["comet"]["trials_used"] == used


@pytest.mark.parametrize("top", [0, -1, 101, float("nan")])
def test_a_percentage_out_of_range_is_refused(top):
    with pytest.raises(StudyError, match="the top percentage must be above 0 and at most 100"):
        rows_of(random_trials(["comet"], 3), top)


def test_equal_validation_losses_are_ranked_by_index():
    lines = [trial("comet", index, 1.0, 10.0 + index) for index in range(20)]
    assert rows_of(lines[::-1])["comet"]["test_loss_mean"] == 10.0


def test_row_of_an_example_computed_by_hand():
    lines = [trial("comet", 0, 3.0, 9.0), trial("comet", 1, 1.0, 5.0), trial("comet", 2, 2.0, 8.0)]
    row = rows_of([*lines, trial("comet", 3, None, None)], top=50)["comet"]
    # The best two of four: test losses 5 and 8, mean 6.5, deviation 3/sqrt(2), error 1.5.
    assert (row["test_loss_mean"], row["test_loss_se"]) == (6.5, pytest.approx(1.5))
    assert row["metrics"]["top_left.accuracy"] == {"mean": pytest.approx(0.9015), "se": pytest.approx(0.0005)}
    assert row["metrics"]["accuracy"] == {"mean": pytest.approx(0.8515), "se": pytest.approx(0.0005)}
    assert "loss" not in row["metrics"]  # tasks have weights, and a plain mean would be another number


def test_comet_is_tested_against_the_best_existing_gate_and_local_search_against_the_gate_without():
    trials = list(random_trials([*GATES, "hash", "hash+"], 200, seed=3))
    rows = rows_of(trials)
    existing = min(("softmax", "hash", "topk", "dselect"), key=lambda gate: rows[gate]["test_loss_mean"])
    used = {gate: losses(best(trials, gate, 10)) for gate in rows}
    for gate, row in rows.items():
        if gate in ("comet", "comet+"):
            expected = ttest_ind(used[gate], used[existing], equal_var=False, alternative="less").pvalue
            assert row["best_existing"] == existing
            assert row["p_existing"] == pytest.approx(expected, rel=1e-9)
            assert row["significant_existing"] == row["asterisk"] == (expected < 0.05)
        else:
            assert row["best_existing"] is row["p_existing"] is row["significant_existing"] is None
            assert not row["asterisk"]
        if gate.endswith("+"):
            plain = used[gate[:-1]]
            expected = ttest_ind(used[gate], plain, equal_var=False, alternative="less").pvalue
            assert row["p_search"] == pytest.approx(expected, rel=1e-9)
            assert row["significant_search"] == (expected < 0.05)
        else:
            assert row["p_search"] is row["significant_search"] is None
    assert [gate for gate in rows if rows[gate]["lowest"]] == [
        min(used, key=lambda gate: np.mean(used[gate]))
    ]


def test_an_ablation_uses_all_trials_and_stars_gates_that_local_search_improves():
    trials = list(random_trials(["hash", "hash+", "comet"], 40, seed=1, failed=2))
    rows = rows_of(trials, kind="ablation")
    assert [row["trials_used"] for row in rows.values()] == [38, 38, 38]
    assert rows["hash"]["test_loss_mean"] == pytest.approx(np.mean(losses(best(trials, "hash", 38))))
    assert rows["comet"]["significant_existing"]
    assert [gate for gate, row in rows.items() if row["asterisk"]] == ["hash+"]


def test_a_seed_that_did_not_converge_counts_only_where_none_did():
    lines = [
        trial(gate, seed, 1.0 + seed, 1.0 + seed, converged=gate == "topk" and seed < 2)
        for gate in ("topk", "dense")
        for seed in range(3)
    ]
    rows = rows_of(lines, kind="ablation")
    assert (rows["topk"]["trials_used"], rows["topk"]["trials_complete"]) == (2, 3)
    assert (rows["topk"]["converged"], rows["topk"]["test_loss_mean"]) == (True, 1.5)
    assert (rows["dense"]["converged"], rows["dense"]["test_loss_mean"]) == (False, 2.0)


def test_a_value_that_does_not_exist_is_none():
    lines = [trial("topk", 0, 1.0, 2.0), trial("comet+", 0, 1.0, 2.0), trial("softmax", 0, None, None)]
    lines[1]["tasks"]["top_left"]["accuracy"] = None
    rows = rows_of([*lines, waiting("hash", 0)])
    assert (rows["topk"]["test_loss_mean"], rows["topk"]["test_loss_se"]) == (2.0, None)
    assert rows["comet+"]["best_existing"] == "topk"
    assert rows["comet+"]["p_existing"] is rows["comet+"]["p_search"] is None
    metrics = rows["comet+"]["metrics"]
    assert metrics.keys() == {"top_left.loss", "bottom_right.loss", "bottom_right.accuracy", "accuracy"}
    assert metrics["accuracy"] == metrics["bottom_right.accuracy"]  # the mean over the tasks that have it
    for gate in ("softmax", "hash"):
        assert rows[gate]["test_loss_mean"] is rows[gate]["experts_per_sample_mean"] is None
        assert rows[gate]["metrics"] == {}
        assert not rows[gate]["lowest"]


@settings(max_examples=15)
@given(st.randoms(use_true_random=False), st.integers(0, 30), st.integers(0, 10**6))
def test_order_and_failed_trials_do_not_change_the_means(random, failed, seed):
    done = [line for line in random_trials(["topk", "comet+", "comet"], 30, seed=seed) if line["index"] < 25]
    lost = [trial(gate, 30 + at, None, None) for gate in ("topk", "comet") for at in range(failed)]
    shuffled = random.sample(done + lost, len(done + lost))
    gates = ["topk", "comet+", "comet"]
    before, after = rows_of(done, trials=60, gates=gates), rows_of(shuffled, trials=60, gates=gates)
    for gate, row in before.items():
        assert after[gate] | {"trials_failed": 0} == row
