"""``comet-moe compare`` on a small table: rows, trees, resuming, a time budget, and wrong arguments."""

import json

import pytest
from command import refusal, succeed

from made_tables import TASKS, customers, write_table

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
    assert first.json["best"] in rows
    assert first.json["recommendation"].startswith("Use ")
    for row in rows.values():
        assert row["trials_complete"] == 2
        assert {name.partition(".")[0] for name in row["metrics"] if "." in name} == set(TASKS)
    assert rows["dense"]["verdict"] == "dense"
    assert 0 <= rows["topk"]["p_dense"] <= 1
    assert 0 <= rows["topk"]["p_trees"] <= 1
    assert (out / "compare.html").stat().st_size > 10_000
    trees = (out / "trees.jsonl").read_bytes()
    again = succeed(*command, "--json", "--resume")
    assert again.json == first.json
    assert (out / "trees.jsonl").read_bytes() == trees
    text = succeed(*command, "--resume").out
    assert "p vs trees" in text
    assert first.json["recommendation"] in text


@pytest.mark.slow
def test_a_time_budget_ends_with_fewer_seeds(tmp_path, table):
    done = succeed(
        *("compare", table, "--targets", "bought", "--gates", "dense,topk", "--seeds", "3", "--no-trees"),
        *("--time-budget", "0.0001", *QUICK, "--out", tmp_path / "study", "--json"),
    )
    assert [row["trials_complete"] for row in done.json["rows"]] == [1, 1]
    assert "time budget: 1 of 3 seeds per gate" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--targets", "colour"], "has no column colour, which is to be a target"),
        (["--targets", "bought", "--tasks", "age=regression"], "age is not one of the targets bought"),
        (["--targets", "bought", "--weights", "bought"], "--weights has the form column=value"),
        (["--targets", ","], "names of columns separated by commas"),
        (["--targets", "bought", "--seeds", "0"], "seeds"),
        (["--targets", "bought", "--gates", "mystery"], "gate must be one of dense, "),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_leaves_nothing(tmp_path, table, arguments, message):
    out = tmp_path / "study"
    assert message in refusal("compare", table, *arguments, "--out", out)
    assert not out.exists()


def test_a_missing_table_is_one_sentence(tmp_path):
    assert "does not exist" in refusal("compare", tmp_path / "nothing.csv", "--targets", "a")


def test_trees_have_the_metrics_of_the_networks(tmp_path, table, monkeypatch):
    from comet_moe.config import load_train_config
    from comet_moe.training.batches import load_dataset
    from comet_moe.training.boosted_trees import train_trees
    from comet_moe.training.table_parts import read_schema, table_tasks

    monkeypatch.setenv("COMET_MOE_CACHE", str(tmp_path / "cache"))
    targets = {name: {"kind": kind} for name, kind in TASKS.items()}
    settings = [f"data.path={table}", f"data.options.targets={json.dumps(targets)}"]
    config = load_train_config("table", settings)
    dataset = load_dataset(config)
    result = train_trees(dataset, table_tasks(read_schema(dataset.meta), config.loss), seed=0)
    assert result.tasks["bought"]["auc"] > 0.6
    assert result.tasks["spend"]["r2"] > 0.5
    weighted = sum(metrics["loss"] for metrics in result.tasks.values()) / 4
    assert result.test_loss == pytest.approx(100 * weighted)
