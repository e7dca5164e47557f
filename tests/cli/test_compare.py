"""``comet-moe compare`` on a small table: rows, trees, resuming, a time budget, and wrong arguments."""

import numpy as np
import pandas as pd
import pytest
from command import comet_moe, refusal, succeed

from comet_moe.cli.compare import _gates, _study_options, _without_pattern
from comet_moe.experiments.studies.defaults import FRONTIER
from comet_moe.experiments.training.records import BASELINES
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
def test_gates_and_baselines_are_compared_and_the_comparison_resumes(tmp_path, table):
    out = tmp_path / "study"
    command = ("compare", table, "--targets", "bought,segment,spend,visits", "--tasks", "visits=count")
    command += ("--exclude", "customer_id", "--gates", "dense,topk", "--seeds", "2", *QUICK, "--out", out)
    first = succeed(*command, "--json")
    rows = {row["gate"]: row for row in first.json["rows"]}
    baselines = ("linear", "lightgbm")
    assert list(rows) == ["dense", "topk", *baselines]
    winner = first.json["winner"]
    assert winner in rows
    assert first.json["recommendation"].startswith("Use ")
    for gate, row in rows.items():
        assert row["trials_complete"] == (1 if gate in baselines else 2)
        assert row["seconds_mean"] > 0
        assert row["predict_seconds_per_row"] > 0
        assert row["rows_error"].keys() == rows.keys() - {gate}
        assert sum(row["test_rows"]["bought"]) == 45
        assert {name.partition(".")[0] for name in row["metrics"] if "." in name} == set(TASKS)
    assert rows["dense"]["verdict"] == "dense"
    assert rows["dense"]["routing_gain_mean"] is None
    assert rows["topk"]["routing_gain_se"] >= 0
    assert {target["routing_gain_mean"] is None for target in rows["topk"]["routing"].values()} == {False}
    assert 0 <= rows["topk"]["p_dense"] <= 1
    assert 0 <= rows["topk"]["p_trees"] <= 1
    assert (out / "compare.html").stat().st_size > 10_000
    trees = (out / "lightgbm.skops").stat()
    again = succeed(*command, "--json", "--resume")
    assert again.json == first.json
    # Other options do not change what the folder holds, nor what is decided from it.
    assert succeed(*command, "--json", "--resume", "--no-trees", "--seeds", "1").json == first.json
    assert (out / "lightgbm.skops").stat() == trees
    text = succeed(*command, "--resume").out
    assert "p vs trees" in text
    assert first.json["recommendation"] in text
    # Predictions come from the winner and keep a column.
    done = succeed("predict", out, table, "-o", tmp_path / "p.csv", "--keep", "customer_id")
    predictions = pd.read_csv(tmp_path / "p.csv")
    assert list(predictions)[:2] == ["customer_id", "bought"]
    assert predictions["customer_id"].tolist() == list(range(300))
    assert f"{BASELINES.get(winner, f'gate {winner}')}, the recommended" in done.err
    # So do metrics, and those of a baseline are computed again from its file.
    evaluated = succeed("evaluate", out, "--json").json
    assert evaluated["test_loss"] == pytest.approx(rows[winner]["test_loss_mean"], rel=0.5)
    again = succeed("evaluate", out / "lightgbm.skops", "--json").json
    assert again["test_loss"] == rows["lightgbm"]["test_loss_mean"]
    assert again["tasks"]["spend"]["r2"] == rows["lightgbm"]["metrics"]["spend.r2"]["mean"]
    if winner in baselines:
        assert "which is no network: give the folder of a run in" in refusal_after_note("export", out)
    (kept,) = (out / "runs").glob("topk-*/model.safetensors")
    dropped = next(run for run in (out / "runs").glob("topk-*") if run != kept.parent)
    assert "--keep-models to keep all" in refusal("evaluate", dropped)
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


@pytest.mark.parametrize("key", [None, "segment"])
def test_a_setting_does_not_add_the_gate_of_a_key(tmp_path, key):
    options = ("people.csv", "bought", None, None, None, None, key, None, ["training.epochs=3"])
    assert ("hash" in _study_options(*options, tmp_path, None, False).gates) == (key is not None)


@pytest.mark.parametrize("table", ["people.csv", "people", "people/*", "people/*.csv", "people/**/[ab]?.csv"])
def test_a_study_has_the_name_of_its_file_or_folder(table):
    assert _without_pattern(table).stem == "people"


@pytest.mark.slow
def test_a_budget_ends_with_fewer_networks_and_a_later_command_adds_the_rest(tmp_path, table):
    command = ("compare", table, "--targets", "bought", "--gates", "dense,topk", "--no-baselines", *QUICK)
    command += ("--out", tmp_path / "study", "--json", "--seeds", "3")
    done = comet_moe(*command, "--budget", "0.1s")  # over before the first step
    assert done.code == 1
    assert [row["trials_complete"] for row in done.json["rows"]] == [0, 0]
    assert done.json["notes"] == ["Budget 0.1s: not trained: dense, topk."]
    message = refusal_after_note("predict", tmp_path / "study", table, "-o", tmp_path / "p.csv")
    assert "has no finished run yet, 2 are unfinished: resume it with --resume" in message
    done = succeed(*command, "--budget", "none", "--resume")
    assert [row["trials_complete"] for row in done.json["rows"]] == [3, 3]
    assert done.json["notes"] == []


@pytest.mark.slow
def test_four_test_rows_are_no_evidence_in_any_output(tmp_path):
    table = write_table(customers(26), tmp_path / "few.csv")
    out = tmp_path / "study"
    command = ("compare", table, "--targets", "bought", "--gates", "dense,topk", "--seeds", "2", *QUICK)
    done = succeed(*command, "--out", out, "--json")
    missing = "bought has 4 test rows, and a verdict takes at least 30"
    assert done.json["pays"] is None
    assert done.json["recommendation"].startswith(f"No verdict: {missing}.")
    assert done.json["answer"].endswith(f"Not tested: {missing}.")
    assert "rest on few test rows: bought" in done.json["notes"][-1]
    assert missing in succeed("table", out).out
    assert missing in (out / "compare.html").read_text(encoding="utf-8")
    used = succeed("predict", out, table, "-o", tmp_path / "p.csv").err
    assert f"{BASELINES.get(done.json['winner'], done.json['winner'])}" in used


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
