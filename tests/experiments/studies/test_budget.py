"""The rounds of a comparison within a time budget."""

import pytest

from comet_moe.experiments.studies.budget import FIRST_SHARE, Trained, first_round, next_round, parse_budget

GATES = ["dense-0.5x", "dense", "dense-2x", "softmax", "topk", "sigmoid", "comet", "comet+"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("0.5s", 0.5), ("none", None)]
)
def test_a_budget_is_a_number_and_a_unit(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "-1m", "nan", "0s", "1d", "10 m", "None"])
def test_any_other_text_is_refused(text):
    with pytest.raises(ValueError, match="must be a time such as 90s, 10m or 1h, or none, got"):
        parse_budget(text)


@pytest.mark.parametrize("workers", [1, 2, 20])
def test_the_first_seed_of_all_networks_ends_within_its_share(workers):
    first = first_round(GATES, len(GATES), 600, workers)
    assert first.gates == GATES
    rounds_of_workers = -(-len(GATES) // workers)
    assert rounds_of_workers * first.max_seconds <= FIRST_SHARE * 600 * max(
        1, rounds_of_workers * workers / len(GATES)
    )


def test_the_seeds_that_a_resumed_comparison_has_left_share_the_time_of_its_first_round():
    assert first_round(GATES, 24, 600, 2).max_seconds * 24 / 2 == pytest.approx(FIRST_SHARE * 600)
    assert first_round(GATES, 0, 600, 2).gates == GATES  # nothing is left: the round ends at once


def test_later_rounds_have_the_dense_networks_and_the_better_half_of_the_mixtures():
    trained = {gate: Trained(10.0 - position, 5.0) for position, gate in enumerate(GATES)}
    second = next_round(trained, 600, 1)
    assert second.gates == ["dense-0.5x", "dense", "dense-2x", "comet+", "comet", "sigmoid"]
    assert second.max_seconds == 100
    third = next_round({gate: trained[gate] for gate in second.gates}, 600, 1)
    assert third.gates == ["dense-0.5x", "dense", "dense-2x", "comet+", "comet"]
    alone = next_round({gate: trained[gate] for gate in ("dense", "comet")}, 600, 1)
    assert alone.gates == ["dense", "comet"]


@pytest.mark.parametrize(
    ("seconds", "workers", "fits"), [(20, 1, True), (19, 1, False), (10, 2, True), (9, 4, False)]
)
def test_a_round_that_would_not_end_in_time_is_not_begun(seconds, workers, fits):
    trained = {"dense": Trained(1.0, 10.0), "topk": Trained(1.0, 10.0)}
    assert (next_round(trained, seconds, workers) is not None) == fits


def test_without_a_complete_run_there_is_no_next_round():
    assert next_round({}, 600, 2) is None
