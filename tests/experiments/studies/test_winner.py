"""The recommendation of `comet-moe compare`, and the row of the boosted trees that it is made from."""

import pytest

from comet_moe.experiments.studies.comparison import _tree_row
from comet_moe.experiments.studies.text_tables import comparison_table
from comet_moe.experiments.studies.winner import recommend
from comet_moe.experiments.training.records import ResultRecord


def make_row(gate, loss, p_dense=None, operations=1000.0, p_per_task=None):
    return {
        "gate": gate,
        "test_loss_mean": loss,
        "test_loss_se": 0.1,
        "trials_used": 5,
        "p_dense": p_dense,
        "p_per_task": p_per_task,
        "flops_per_sample_mean": operations,
        "verdict": "routes",
    }


PLAIN = [make_row("dense", 50.0), make_row("dense-per-task", 48.0, 0.001)]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [make_row("dense", 50.0), make_row("topk", 51.0, 0.9)],
            "Use dense: its test loss is the lowest of 2.",
        ),
        ([make_row("dense", 50.0), make_row("topk", 49.0, 0.2)], "Use dense, one network as costly"),
        ([make_row("dense", 50.0), make_row("topk", 49.0, 0.01, 1050.0)], "a dense network of the same cost"),
        # As on MovieLens-100K, where a dense network of as many operations was level with Top-2.
        (
            [make_row("dense", 50.0), make_row("topk", 49.0, 0.01, 1500.0)],
            "takes 1.5 times as many operations",
        ),
        ([make_row("dense", 50.0), make_row("trees", 48.0, 0.01, None)], "Use boosted trees"),
        ([make_row("dense", None), make_row("topk", None)], "No run is complete"),
        (
            [*PLAIN, make_row("comet", 47.9, 1e-4, p_per_task=0.3)],
            "Use dense-per-task, one network for each task, together as costly as the selected experts: ",
        ),
        (
            [*PLAIN, make_row("comet", 46.0, 1e-5, p_per_task=1e-4)],
            "of the same cost (dense-per-task, p < 0.001), and it routes.",
        ),
        (PLAIN, "of the same cost (dense, p = 0.001), and it has no gate."),
        (
            [make_row("dense", 50.0), make_row("dense-wide", 48.0, 0.01, 4000.0)],
            "Use dense-wide: its test loss is below that of dense (p = 0.010). It takes 4.0 times as many",
        ),
    ],
)
def test_the_recommendation_says_what_was_shown(rows, sentence):
    assert sentence in recommend(rows).sentence


def test_the_gate_of_the_recommendation_is_the_one_that_its_sentence_names():
    undecided = recommend([make_row("dense", 50.0), make_row("topk", 49.0, 0.2)])
    assert undecided.gate == "dense"
    assert recommend([make_row("dense", 50.0), make_row("topk", 49.0, 0.01)]).gate == "topk"
    assert recommend([make_row("dense", 50.0), make_row("trees", 48.0, 0.01, None)]).gate == "trees"
    assert recommend([make_row("dense", None)]).gate is None


def trees(*losses):
    records = [ResultRecord(status="complete", gate="trees", test_loss=loss) for loss in losses]
    return _tree_row({"study": "s", "kind": "ablation", "recipe": "table", "gate": "dense"}, records)


def test_trees_without_an_error_have_a_loss_of_zero():
    row = trees(0.0, 0.0)
    assert (row["test_loss_mean"], row["test_loss_se"], row["trials_used"]) == (0.0, 0.0, 2)


def test_trees_without_a_finite_loss_are_left_out():
    row = trees(2.0, float("nan"), 4.0)
    assert (row["test_loss_mean"], row["trials_complete"], row["trials_failed"]) == (3.0, 2, 1)


@pytest.mark.parametrize(
    ("mean", "text"), [(0.81234, "0.8123"), (12.3456, "12.35"), (71935.8028, "71936"), (None, "")]
)
def test_a_metric_has_about_four_digits_whatever_its_size(mean, text):
    row = trees(1.0) | {"metrics": {"a.mse": {"mean": mean, "se": None}}, "p_dense": None, "p_trees": None}
    row |= {"flops_per_sample_mean": None, "verdict": None}
    (cells,) = comparison_table("title", [row], ["a.mse"]).rows
    assert cells[3].text == text
