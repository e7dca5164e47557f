"""The rounds of a comparison within a time budget."""

import pytest
from made_studies import trial, waiting

from comet_moe.experiments.studies.budget import (
    FIRST_SHARE,
    SHORTEST_RUN,
    Trained,
    describe_reduction,
    first_round,
    next_round,
    parse_budget,
    training_seconds,
)
from comet_moe.experiments.studies.records import TrialRecord

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
    assert first.gates == first.runs == GATES
    rounds_of_workers = -(-len(GATES) // workers)
    assert rounds_of_workers * first.max_seconds <= FIRST_SHARE * 600 * max(
        1, rounds_of_workers * workers / len(GATES)
    )


@pytest.mark.parametrize(
    ("seconds", "gates"),
    [
        (600, GATES),
        (60, ["dense", "softmax", "topk", "sigmoid", "comet", "comet+"]),
        (45, ["dense", "softmax", "topk", "sigmoid"]),
        (1, ["dense", "softmax"]),
        (-1, ["dense", "softmax"]),
    ],
)
def test_less_time_than_a_run_takes_means_fewer_networks(seconds, gates):
    first = first_round(GATES, len(GATES), seconds, 1)
    assert first.gates == gates
    assert len(gates) == 2 or first.max_seconds >= SHORTEST_RUN
    assert first.max_seconds >= 0


def test_the_seeds_that_a_resumed_comparison_has_left_share_the_time_of_its_first_round():
    assert first_round(GATES, 24, 600, 2).max_seconds * 24 / 2 == pytest.approx(FIRST_SHARE * 600)
    assert first_round([], 0, 600, 2).runs == []  # nothing is left


def test_later_rounds_have_the_dense_networks_and_the_better_half_of_the_mixtures():
    trained = {gate: Trained(10.0 - position, 5.0) for position, gate in enumerate(GATES)}
    second = next_round(trained, 600, 1)
    assert second.gates == second.runs == ["dense-2x", "dense", "dense-0.5x", "comet+", "comet", "sigmoid"]
    assert (second.max_seconds, second.adds_seed) == (100, True)
    third = next_round({gate: trained[gate] for gate in second.gates}, 600, 1)
    assert third.gates == ["dense-2x", "dense", "dense-0.5x", "comet+", "comet"]
    alone = next_round({gate: trained[gate] for gate in ("dense", "comet")}, 600, 1)
    assert alone.gates == ["dense", "comet"]


def test_networks_that_have_not_converged_are_trained_on_before_there_is_another_seed():
    trained = {gate: Trained(10.0 - position, 5.0, gate == "dense") for position, gate in enumerate(GATES)}
    second = next_round(trained, 200, 1)
    assert second.gates == ["dense-2x", "dense", "comet+", "comet", "sigmoid"]
    assert second.runs == ["dense-2x", "comet+", "comet", "sigmoid"]
    assert (second.max_seconds, second.adds_seed) == (25, False)  # half of the time
    last = next_round({gate: trained[gate] for gate in ("dense", "comet")}, 200, 1)
    assert (last.runs, last.max_seconds) == (["comet"], 200)  # nothing is left to choose from
    short = next_round(trained, 30, 1)
    assert short.max_seconds == 7.5  # half of it would be too short


def test_dense_networks_that_cannot_all_converge_are_halved_as_well_and_others_are_kept():
    trained = {gate: Trained(10.0 - position, 5.0, False) for position, gate in enumerate(GATES)}
    candidates = next_round(trained, 600, 1).gates
    assert candidates == ["dense-2x", "dense", "comet+", "comet", "sigmoid"]
    candidates = next_round({gate: trained[gate] for gate in candidates}, 300, 1).gates
    assert candidates == ["dense-2x", "comet+", "comet"]
    last = next_round({gate: trained[gate] for gate in ("dense-2x", "comet+")}, 100, 1)
    assert (last.gates, last.max_seconds) == (["dense-2x", "comet+"], 50)  # all of the time


@pytest.mark.parametrize(("imports", "seconds"), [(3, 540), (100, 500), (590, 450)])
def test_what_follows_training_is_given_as_long_as_the_imports_took(imports, seconds):
    assert training_seconds(600, imports) == seconds


@pytest.mark.parametrize(
    ("seconds", "workers", "fits"), [(20, 1, True), (19, 1, False), (10, 2, True), (9, 4, False)]
)
def test_a_round_that_would_not_end_in_time_is_not_begun(seconds, workers, fits):
    trained = {"dense": Trained(1.0, 10.0), "topk": Trained(1.0, 10.0)}
    assert (next_round(trained, seconds, workers) is not None) == fits


def test_no_round_is_shorter_than_a_run():
    assert next_round({"dense": Trained(1.0, 0.1), "topk": Trained(1.0, 0.1)}, SHORTEST_RUN - 0.1, 1) is None


def test_without_a_complete_run_there_is_no_next_round():
    assert next_round({}, 600, 2) is None


def test_what_a_budget_has_reduced_is_one_line():
    records = [
        TrialRecord.model_validate(line)
        for line in (
            trial("dense", 0, 1.0, 1.0, converged=True),
            trial("dense", 1, 1.0, 1.0, converged=True),
            trial("topk", 0, 1.0, 1.0, converged=False),
            waiting("topk", 1),
            waiting("comet", 0),
        )
    ]
    gates = ["dense", "topk", "comet"]
    assert describe_reduction(records, gates, 2) == (
        "not trained: comet; seeds of 2 per network: topk 1; epochs before convergence: topk"
    )
    assert describe_reduction(records[:2], ["dense"], 2) == ""
