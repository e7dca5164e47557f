"""The decision which network to use, and whether a mixture pays."""

import numpy as np
import pytest
from made_studies import made_study, random_trials, trial

from comet_moe.experiments.studies.comparison_table import comparison_table
from comet_moe.experiments.studies.evidence import few_rows
from comet_moe.experiments.studies.tables import compare_gates
from comet_moe.experiments.studies.text_tables import result_notes
from comet_moe.experiments.studies.winner import decide, winner
from comet_moe.experiments.training.records import BASELINES, LIGHTGBM, LINEAR, TREES

SPREAD = (-0.1, 0.0, 0.1)
DENSE = {"dense-0.5x": (6.0, 6.0, 100.0), "dense": (5.0, 5.0, 200.0), "dense-2x": (5.1, 5.1, 400.0)}


def study_of(networks, seeds=3):
    return made_study(
        [
            trial(name, seed, validation + change, test + change, flops_per_sample=operations)
            for name, (validation, test, operations) in networks.items()
            if name not in BASELINES
            for seed, change in enumerate(SPREAD[:seeds])
        ],
        kind="ablation",
    )


def rows_of(networks, seeds=3):
    """The rows of a study with NAME=(validation loss, test loss, operations); baselines have one fit."""
    rows = compare_gates(study_of(networks, seeds))
    for name in (name for name in BASELINES if name in networks):
        validation, test, _ = networks[name]
        fitted = dict.fromkeys(rows[0]) | {"gate": name, "routing": {}, "metrics": {}, "converged": True}
        rows.append(fitted | {"validation_loss_mean": validation, "test_loss_mean": test})
    return rows


@pytest.mark.parametrize(
    ("networks", "gate", "pays", "words"),
    [
        (
            DENSE | {"topk": (4.0, 4.0, 200.0)},
            "topk",
            True,
            "it has the lowest validation loss of 4, and a test loss of 4.00 against 5.00 of dense (p",
        ),
        (
            DENSE | {"topk": (4.95, 4.95, 200.0)},
            "dense",
            False,
            "Use dense: at the same cost it is simpler than topk, which has the lowest validation loss of 4, "
            "but no significantly lower test loss, 4.95 against 5.00 of dense (p = 0.287).",
        ),
        (DENSE | {"topk": (7.0, 7.0, 200.0)}, "dense", False, "Use dense: it has the lowest validation loss"),
        # Chosen on validation: the test loss of the other mixture is lower, and is not what is judged.
        (
            DENSE | {"topk": (4.0, 5.2, 200.0), "comet": (4.5, 3.0, 200.0)},
            "dense",
            False,
            "Use dense: at the same cost it is simpler than topk",
        ),
        # The best on validation costs more than any dense network, so that another is judged.
        (
            DENSE | {"softmax": (3.0, 3.0, 900.0), "topk": (4.0, 4.0, 200.0)},
            "softmax",
            True,
            "It takes 2.2 times the operations of dense-2x",
        ),
        # Wider networks pay too, and a mixture that is only better than a narrower one does not.
        (DENSE | {"dense-2x": (3.0, 3.0, 400.0)}, "dense-2x", None, "3.00 against 5.00 of dense (p"),
        (
            DENSE | {"dense-2x": (4.0, 4.0, 400.0), "topk": (3.99, 4.01, 400.0)},
            "dense-2x",
            False,
            "Use dense-2x: at the same cost it is simpler than topk",
        ),
        (DENSE | {"topk": (3.0, 3.0, 800.0)}, "topk", None, "It takes 2 times the operations of dense-2x"),
        ({"dense": (5.0, 5.0, 200.0), "topk": (6.0, 6.0, 200.0)}, "dense", False, "no cheaper dense network"),
        (
            {"topk": (6.0, 6.0, 200.0)},
            "topk",
            None,
            "Use topk: it has the lowest validation loss of 1, and nothing else",
        ),
        (
            DENSE | {"trees": (2.0, 2.0, None)},
            TREES,
            None,
            "Use boosted trees: they have the lowest validation",
        ),
        (
            DENSE | {"trees": (4.9, 5.05, None)},
            TREES,
            None,
            "On the test set there is no significant difference: 5.05 against 5.00 of dense",
        ),
        (
            DENSE | {"trees": (5.2, 5.2, None), "topk": (4.9, 5.19, 200.0)},
            "dense",
            False,
            "Use dense: at the same cost it is simpler than topk",
        ),
        (
            DENSE | {"lightgbm": (4.9, 5.05, None)},
            LIGHTGBM,
            None,
            "Use LightGBM: it has the lowest validation loss of 4. On the test set there is no significant",
        ),
        # Nothing is simpler than a linear model, which is recommended until something beats it.
        (
            DENSE | {"linear": (4.0, 4.0, None), "lightgbm": (4.5, 4.5, None)},
            LINEAR,
            None,
            "Use the linear model: it has the lowest validation loss of 5, and nothing simpler was trained.",
        ),
        (
            DENSE | {"linear": (5.02, 5.02, None)},
            LINEAR,
            None,
            "Use the linear model: it is simpler than dense, which has the lowest validation loss of 4",
        ),
        (
            DENSE | {"linear": (9.0, 9.0, None)},
            "dense",
            None,
            "a test loss of 5.00 against 6.00 of dense-0.5x",
        ),
        # Nothing is said to cost less that was not measured.
        (
            {"topk": (4.9, 4.9, 400.0), "trees": (4.95, 4.95, None)},
            TREES,
            None,
            "Use boosted trees: they are simpler than topk",
        ),
        (
            DENSE | {"dense-0.5x": (5.1, 5.1, 190.0)},
            "dense-0.5x",
            None,
            "Use dense-0.5x: it costs less than dense, which has the lowest",
        ),
    ],
)
def test_the_decision(networks, gate, pays, words):
    decision = winner(rows_of(networks))
    assert decision.winner == gate
    assert words in decision.recommendation
    assert decision.pays is pays
    name = BASELINES.get(decision.winner, decision.winner)
    assert decision.recommendation.startswith(f"Use {name}: ")


def test_one_seed_decides_nothing():
    decision = winner(rows_of(DENSE | {"topk": (3.0, 3.0, 200.0)}, seeds=1))
    assert (decision.winner, decision.pays, decision.p) == ("dense", None, None)
    assert "too few seeds to test it (2.90 against 4.90 of dense): train more" in decision.recommendation
    assert "Not tested, with one seed of one of them" in decision.answer


def with_rows(networks, error, test_rows):
    """The rows of a study whose losses on samples of the test rows differ by ``error`` between networks."""
    noise = np.random.default_rng(0).normal(size=200)
    lines = [
        trial(
            name,
            seed,
            validation + change,
            test + change,
            flops_per_sample=operations,
            loss_resamples=list(test + change + error * position * noise),
            test_rows=test_rows,
        )
        for position, (name, (validation, test, operations)) in enumerate(networks.items())
        for seed, change in enumerate(SPREAD)
    ]
    return compare_gates(made_study(lines, kind="ablation"))


ENOUGH = {"bought": [500, 100]}


def test_a_difference_within_the_error_over_test_rows_is_no_evidence():
    networks = {"dense": (5.0, 5.0, 200.0), "topk": (4.0, 4.0, 200.0)}
    few, many = (with_rows(networks, error, ENOUGH) for error in (1.0, 0.01))
    assert few[0]["rows_error"]["topk"] == pytest.approx(
        np.random.default_rng(0).normal(size=200).std(ddof=1)
    )
    assert (winner(many).winner, winner(many).pays) == ("topk", True)
    assert (winner(few).winner, winner(few).pays) == ("dense", False)
    assert winner(few).p > 0.1 > 0.01 > winner(many).p


def test_the_error_over_test_rows_of_a_mean_of_dense_networks_is_at_most_theirs():
    networks = {"dense": (5.0, 5.0, 100.0), "dense-2x": (4.0, 4.0, 400.0), "topk": (4.0, 4.0, 200.0)}
    exact, noisy = (with_rows(networks, error, ENOUGH)[2] for error in (0.0, 0.3))
    assert exact["dense_rival"] == noisy["dense_rival"]
    assert exact["p_dense"] < noisy["p_dense"]


@pytest.mark.parametrize(
    ("test_rows", "missing"),
    [
        ({"bought": [3, 1]}, "bought has 4 test rows, and a verdict takes at least 30"),
        (
            {"bought": [599, 1]},
            "bought has 1 test rows of its rarer class, of 600, and a verdict takes at least 10",
        ),
        (
            {"kind": [400, 9, 9]},
            "kind has 9 test rows of its second most frequent class, of 418, and a verdict takes at least 10",
        ),
        ({"spend": [29]}, "spend has 29 test rows, and a verdict takes at least 30"),
        ({"bought": [3, 1], "spend": [4]}, "bought has 4 test rows, and a verdict takes at least 30"),
    ],
)
def test_too_few_test_rows_are_no_evidence(test_rows, missing):
    rows = with_rows({"dense": (5.0, 5.0, 200.0), "topk": (2.0, 2.0, 200.0)}, 0.01, test_rows)
    decision = winner(rows)
    assert decision.recommendation.startswith(f"No verdict: {missing}. Until then topk is used")
    assert decision.answer == f"Does a mixture pay on this data? Not tested: {missing}."
    assert (decision.pays, decision.p) == (None, None)
    assert few_rows(rows) == list(test_rows)


@pytest.mark.parametrize(
    "test_rows", [{}, {"spend": [30]}, {"bought": [590, 10]}, {"rare": [599, 1], "spend": [600]}]
)
def test_enough_test_rows_of_one_target_are_evidence(test_rows):
    rows = with_rows({"dense": (5.0, 5.0, 200.0), "topk": (2.0, 2.0, 200.0)}, 0.01, test_rows)
    assert winner(rows).pays is True
    assert few_rows(rows) == [name for name in test_rows if name == "rare"]


def test_two_seeds_are_said_to_be_few():
    decision = winner(rows_of(DENSE | {"topk": (4.95, 4.95, 300.0)}, seeds=2))
    assert decision.winner == "dense"
    assert decision.recommendation.endswith("There are only 2 seeds: train more.")
    assert "seeds" not in winner(rows_of(DENSE | {"topk": (4.95, 4.95, 300.0)})).recommendation


@pytest.mark.parametrize(
    ("losses", "gate", "words"),
    [
        (
            (4.9, 5.0),
            "dense",
            "Use dense: it is simpler than topk, which has the lowest validation loss of 2",
        ),
        ((4.0, 5.0), "topk", "a test loss of 4.00 against 5.00 of dense (p"),
    ],
)
@pytest.mark.parametrize("known", [None, 200.0])
def test_without_recorded_operations_a_mixture_has_to_beat_a_dense_network(losses, gate, words, known):
    topk, dense = losses
    decision = winner(rows_of({"topk": (topk, topk, None), "dense": (dense, dense, known)}))
    assert decision.winner == gate
    assert words in decision.recommendation
    assert (decision.pays, decision.answer) == (
        None,
        "Does a mixture pay on this data? Not tested: operations were not recorded.",
    )


def test_a_mixture_alone_cannot_be_said_to_pay():
    decision = winner(rows_of({"topk": (4.0, 4.0, 200.0)}))
    assert decision.answer.endswith("Not tested: no dense network was trained.")
    rows = [row | {"converged": row["gate"] == "dense"} for row in rows_of(DENSE | {"topk": (4.0, 4.0, 2.0)})]
    assert winner(rows).answer.endswith("Not tested: no mixture has converged within the budget.")


def test_boosted_trees_whose_time_was_over_are_ranked_and_networks_are_not():
    rows = rows_of({"dense": (5.0, 5.0, 1.0), "topk": (1.0, 1.0, 2.0), "trees": (2.0, 2.0, None)})
    rows = [row | {"converged": row["gate"] == "dense"} for row in rows]
    decision = winner(rows)
    assert decision.winner == TREES
    assert "More time may lower the loss of boosted trees. Not converged" in decision.recommendation
    assert decision.recommendation.endswith("and not ranked: topk.")


def test_a_network_that_converged_alone_is_not_called_the_only_one():
    rows = [row | {"converged": row["gate"] == TREES} for row in rows_of(DENSE | {"trees": (2.0, 2.0, None)})]
    sentence = "Use boosted trees: they have the lowest validation loss of 1, and nothing else has converged."
    assert winner(rows).recommendation.startswith(sentence)


def test_without_a_complete_run_nothing_is_recommended():
    decision = winner(compare_gates(made_study([trial("dense", 0, None, None)])))
    assert (decision.winner, decision.pays, decision.answer) == (None, None, "")
    assert decision.recommendation == "No run is complete: see the reasons in the study folder."


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("static", "But it does not route (static): the gain has another cause."),
        ("static / blends", "But it does not route (static / blends)"),
        ("routes / static", "Routing: routes / static."),
        ("dense", "It uses all experts."),
    ],
)
def test_a_mixture_that_pays_says_whether_it_routes(verdict, words):
    rows = rows_of(DENSE | {"topk": (4.0, 4.0, 200.0)})
    decision = winner([row | {"verdict": verdict} for row in rows])
    assert words in decision.answer


def test_the_table_prints_the_decision():
    study = study_of(DENSE | {"topk": (4.0, 4.0, 200.0)})
    rows = compare_gates(study)
    decision = winner(rows)
    assert f"{decision.recommendation} {decision.answer}" in result_notes([(study, rows)], 5)


def test_another_share_of_the_trials_in_a_table_does_not_change_the_decision():
    study = made_study(random_trials(["dense", "topk", "comet"], 40))
    tables = [[(study, compare_gates(study, top))] for top in (5, 50)]
    (first, *_), (second, *notes) = (
        result_notes(table, top) for table, top in zip(tables, (5, 50), strict=True)
    )
    assert first == second == f"{decide(study).recommendation} {decide(study).answer}"
    assert "What to use is decided over the best 5 %, whatever the table shows." in notes


@pytest.mark.parametrize(
    ("mean", "text"), [(0.81234, "0.8123"), (12.3456, "12.35"), (71935.8028, "71936"), (None, "")]
)
def test_a_metric_has_about_four_digits_whatever_its_size(mean, text):
    row = rows_of({"dense": (1.0, 1.0, 10.0)})[0] | {"metrics": {"a.mse": {"mean": mean, "se": None}}}
    (cells,) = comparison_table("title", [row], {"a": "mse"}).rows
    assert cells[3].text == text
