"""``comet-moe compare`` on a small table: rows, trees, resuming, a time budget, and wrong arguments."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from command import comet_moe, refusal, succeed

from comet_moe.cli.compare import _gates
from comet_moe.exceptions import StudyError
from comet_moe.experiments.studies.defaults import FRONTIER
from made_tables import TASKS, customers, write_table


def refusal_after_note(*arguments):
    """The last line of a refusal that comes after the note which run is used."""
    done = comet_moe(*arguments)
    assert done.code == 2
    return done.err.splitlines()[-1]


QUICK = ("--set", "training.epochs=2", "--set", "training.batch_size=64", "--workers", "1")


@pytest.fixture
def table(tmp_path):
    return write_table(customers(300), tmp_path / "people.parquet")


@pytest.mark.slow
def test_gates_and_trees_are_compared_and_the_comparison_resumes(tmp_path, table):
    out = tmp_path / "study"
    command = ("compare", table, "--targets", "bought,segment,spend,visits", "--tasks", "visits=count")
    command += ("--exclude", "customer_id", "--gates", "dense,topk", "--seeds", "2", *QUICK, "--out", out)
    first = succeed(*command, "--json")
    rows = {row["gate"]: row for row in first.json["rows"]}
    assert list(rows) == ["dense", "topk", "trees"]
    winner = first.json["winner"]
    assert winner in rows
    assert first.json["recommendation"].startswith("Use ")
    for gate, row in rows.items():
        assert row["trials_complete"] == (1 if gate == "trees" else 2)
        assert {name.partition(".")[0] for name in row["metrics"] if "." in name} == set(TASKS)
    assert rows["dense"]["verdict"] == "dense"
    assert rows["dense"]["routing_gain_mean"] is None
    assert rows["topk"]["routing_gain_se"] >= 0
    assert {target["routing_gain_mean"] is None for target in rows["topk"]["routing"].values()} == {False}
    assert 0 <= rows["topk"]["p_dense"] <= 1
    assert 0 <= rows["topk"]["p_trees"] <= 1
    assert (out / "compare.html").stat().st_size > 10_000
    trees = (out / "trees.skops").stat()
    again = succeed(*command, "--json", "--resume")
    assert again.json == first.json
    # Other options do not change what the folder holds, nor what is decided from it.
    assert succeed(*command, "--json", "--resume", "--no-trees", "--seeds", "1").json == first.json
    assert (out / "trees.skops").stat() == trees
    text = succeed(*command, "--resume").out
    assert "p vs trees" in text
    assert first.json["recommendation"] in text
    # Predictions come from the winner and keep a column.
    done = succeed("predict", out, table, "-o", tmp_path / "p.csv", "--keep", "customer_id")
    predictions = pd.read_csv(tmp_path / "p.csv")
    assert list(predictions)[:2] == ["customer_id", "bought"]
    assert predictions["customer_id"].tolist() == list(range(300))
    chosen = (
        "boosted trees, the recommended model" if winner == "trees" else f"gate {winner}, the recommended"
    )
    assert chosen in done.err
    refused = refusal_after_note("predict", out, table, "-o", tmp_path / "p.csv", "--keep", "id")
    assert "has no column id to keep" in refused


@pytest.mark.parametrize(
    ("given", "targets", "has_key", "resume", "gates"),
    [
        (None, 1, False, False, [*FRONTIER, "softmax", "topk", "sigmoid", "comet", "comet+"]),
        (
            None,
            2,
            False,
            False,
            [*FRONTIER, "dense-per-task", "softmax", "topk", "sigmoid", "comet", "comet+"],
        ),
        (None, 1, True, False, [*FRONTIER, "softmax", "topk", "sigmoid", "comet", "comet+", "hash"]),
        (None, 2, False, True, None),
        ("topk,comet", 2, True, True, ["topk", "comet"]),
    ],
)
def test_the_gates_follow_from_the_targets_and_the_key(given, targets, has_key, resume, gates):
    assert _gates(given, targets, has_key, resume) == gates


@pytest.mark.slow
def test_a_budget_ends_with_fewer_epochs_and_seeds_and_a_later_command_adds_the_rest(tmp_path, table):
    command = ("compare", table, "--targets", "bought", "--gates", "dense,topk", "--no-trees", *QUICK)
    command += ("--out", tmp_path / "study", "--json", "--seeds", "3")
    done = succeed(*command, "--budget", "0.1s")  # over before the first step
    assert [row["trials_complete"] for row in done.json["rows"]] == [1, 1]
    assert [row["converged"] for row in done.json["rows"]] == [False, False]
    assert "No network has converged within the budget" in done.json["recommendation"]
    assert "budget 0.1s: seeds of 3 per network: dense 1, topk 1" in done.err
    done = succeed(*command, "--budget", "none", "--resume")
    assert [row["trials_complete"] for row in done.json["rows"]] == [3, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--targets", "colour"], "has no column colour, which is to be a target"),
        (["--targets", "bought", "--tasks", "age=regression"], "age is not one of the targets bought"),
        (["--targets", "bought", "--weights", "bought"], "--weights has the form column=value"),
        (["--targets", ","], "--targets must be names separated by commas, got ','"),
        (["--targets", "bought", "--seeds", "0"], "seeds"),
        (["--targets", "bought", "--gates", "mystery"], "gate must be one of dense, "),
        (
            ["--targets", "bought", "--set", "training.epoch=1"],
            "there is no setting training.epoch, did you mean training.epochs?",
        ),
        (
            ["--targets", "bought", "--gates", "dense,softmax", "--set", "gate.k=4"],
            "the gate softmax has no setting k",
        ),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_leaves_nothing(tmp_path, table, arguments, message):
    out = tmp_path / "study"
    assert message in refusal("compare", table, *arguments, "--out", out)
    assert not out.exists()


def test_many_numbers_as_a_binary_target_are_of_kind_regression(tmp_path):
    table = write_table(customers(1500).assign(spend=np.arange(1500)), tmp_path / "people.parquet")
    message = refusal(
        "compare", table, "--targets", "spend", "--tasks", "spend=binary", "--out", tmp_path / "s"
    )
    assert "has more than 1,000 distinct values as target spend" in message
    assert "choose the kind regression" in message


def test_a_missing_table_is_one_sentence(tmp_path):
    assert "does not exist" in refusal("compare", tmp_path / "nothing.csv", "--targets", "a")


def test_trees_have_the_metrics_of_the_networks(tmp_path, table, monkeypatch):
    from comet_moe.experiments.config import load_train_config
    from comet_moe.experiments.training.batches import load_dataset
    from comet_moe.experiments.training.boosted_trees import BoostedTrees, train_trees

    monkeypatch.setenv("COMET_MOE_CACHE", str(tmp_path / "cache"))
    targets = {name: {"kind": kind} for name, kind in TASKS.items()}
    settings = [f"data.path={table}", f"data.options.targets={json.dumps(targets)}"]
    config = load_train_config("table", settings)
    dataset = load_dataset(config)
    trees, result = train_trees(dataset, config)
    assert result.tasks["bought"]["auc"] > 0.6
    assert result.tasks["spend"]["r2"] > 0.5
    weighted = sum(metrics["loss"] for metrics in result.tasks.values()) / 4
    assert result.test_loss == pytest.approx(100 * weighted)
    trees.save(tmp_path / "trees.skops")
    loaded = BoostedTrees.load(tmp_path / "trees.skops")
    for before, after in zip(
        trees.outputs(dataset.test.features), loaded.outputs(dataset.test.features), strict=True
    ):
        assert torch.equal(before, after)
    content = (tmp_path / "trees.skops").read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"text"):
        (tmp_path / "trees.skops").write_bytes(damaged)
        with pytest.raises(StudyError, match="is damaged or not a file of boosted trees"):
            BoostedTrees.load(tmp_path / "trees.skops")
    node = trees.models[0]._predictors[0][0].nodes
    node["left"][0] = len(node)  # a node that does not exist
    for wrong in (trees, BoostedTrees(trees.meta, trees.options, trees.loss, [lambda: 0])):
        wrong.save(tmp_path / "trees.skops")
        with pytest.raises(StudyError, match="is damaged or not a file of boosted trees"):
            BoostedTrees.load(tmp_path / "trees.skops")
