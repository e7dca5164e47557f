"""The ``table`` recipe from the command line, on a table with every kind of column and task."""

import json

import numpy as np
import pandas as pd
import pytest
from command import refusal, succeed
from raw_sets import sets

from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.training.batches import load_dataset
from made_tables import TASKS, customers, write_table

SHORT = ["training.epochs=2", "training.batch_size=64", "model.experts=4", "model.units=[8, 8]", "gate=comet"]


def settings(path, *others, targets=TASKS):
    return sets([f"data.path={path}", f"data.options.targets={json.dumps(targets)}", *SHORT, *others])


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_a_table_of_any_format_trains_all_tasks(tmp_path, suffix):
    path = write_table(customers(), tmp_path / f"my{suffix}")
    others = [] if suffix == ".parquet" else ["data.options.columns.tags=list"]
    out = tmp_path / "run"
    result = succeed("train", "table", *settings(path, *others), "--out", out, "--json").json
    assert result["status"] == "complete"
    assert set(result["tasks"]) == set(TASKS)
    assert result["tasks"]["bought"]["auc"] > 0.5
    evaluated = succeed("evaluate", out, "--json").json
    assert evaluated["tasks"] == result["tasks"]


def test_a_table_needs_targets_that_it_has(tmp_path):
    path = write_table(customers(), tmp_path / "my.csv")
    assert "names of its targets" in refusal("train", "table", *sets([f"data.path={path}"]))
    message = refusal("train", "table", *settings(path, targets=["colour"]))
    assert "has no column colour, which is to be a target; its columns are customer_id, age" in message


@pytest.fixture
def run(tmp_path):
    """A finished run on the table in tmp_path / "my.csv"."""
    path = write_table(customers(), tmp_path / "my.csv")
    options = settings(path, "data.options.columns.tags=list", "data.options.gauc=shop")
    succeed("train", "table", *options, "--out", tmp_path / "run")
    return tmp_path / "run"


def test_a_result_has_every_metric_with_its_interval(run):
    result = json.loads((run / "result.json").read_text())
    numbers = {"mse", "mae", "r2"}
    classes = {"log_loss", "accuracy", "f1", "calibration_error"}
    wanted = {"bought": classes | {"auc", "gauc"}, "segment": classes, "spend": numbers, "visits": numbers}
    assert {task: set(metrics) - {"loss"} for task, metrics in result["tasks"].items()} == wanted
    for task, names in wanted.items():
        assert result["intervals"][task].keys() == names
        low, high = result["intervals"][task]["mae" if task in ("spend", "visits") else "accuracy"]
        assert low < high
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["validation"]["intervals"] == {}


def test_predictions_for_a_new_table_with_its_columns_in_any_order(run, tmp_path):
    new = customers(50, seed=1).drop(columns=["bought", "segment"])
    new["city"] = np.where(np.arange(50) < 7, "Chur", new["city"])
    new["income"] = new["income"].astype(object)
    new.loc[3, "income"] = "much"
    path = write_table(new[new.columns[::-1]].assign(colour="red"), tmp_path / "new.csv")
    done = succeed("predict", run, path, "-o", tmp_path / "out.csv")
    _, _, ignored = done.out.partition("columns that the model does not use: ")
    named = {"customer_id", "colour", "spend (a target)", "visits (a target)"}
    assert set(ignored.splitlines()[0].split(", ")) == named
    assert "city: 7 values were never seen in training" in done.out
    assert "income: 1 texts are not numbers and count as missing" in done.out
    out = pd.read_csv(tmp_path / "out.csv")
    assert list(out) == [
        "bought",
        "segment",
        *(f"segment.{name}" for name in ("high", "low", "middle")),
        "spend",
        "visits",
    ]
    assert len(out) == 50
    assert out["bought"].between(0, 1).all()
    np.testing.assert_allclose(out.filter(like="segment.").sum(axis=1), 1, atol=1e-5)  # float32
    assert 50 < out["spend"].mean() < 200  # in the units of the table
    assert (out["visits"] > 0).all()
    summary = succeed("predict", run, path, "-o", tmp_path / "out.parquet", "--json").json
    assert summary["unknown"] == {"city": 7}
    typed = pd.read_parquet(tmp_path / "out.parquet")
    np.testing.assert_allclose(typed["spend"], out["spend"], rtol=1e-5)


def test_a_new_table_that_lacks_a_column_is_refused(run, tmp_path):
    path = write_table(customers(50).drop(columns=["age", "city"]), tmp_path / "new.csv")
    message = refusal("predict", run, path, "-o", tmp_path / "out.csv")
    assert "has no column age, city, which the model was trained with" in message
    assert not (tmp_path / "out.csv").exists()


def test_predictions_on_the_rows_of_the_table_are_those_that_were_evaluated(run, tmp_path):
    result = json.loads((run / "result.json").read_text())
    succeed("predict", run, tmp_path / "my.csv", "-o", tmp_path / "out.parquet")
    table, out = customers(), pd.read_parquet(tmp_path / "out.parquet")
    dataset = load_dataset(load_train_config(str(run / "config.yaml")))
    days = (table["joined"] - pd.Timestamp(0)).dt.days
    rows = np.column_stack([table["age"], table["income"], days]).astype(np.float32)
    tested = {row.tobytes() for row in dataset.test.features["numeric"]}
    own = [row.tobytes() in tested for row in rows]
    errors = ((out["visits"] - table["visits"]) ** 2)[own]
    assert sum(own) == len(dataset.test)
    assert errors.mean() == pytest.approx(result["tasks"]["visits"]["mse"], rel=1e-4)  # sums in another order


@pytest.mark.slow
def test_a_run_resumes_and_evaluates_and_counts_operations_and_exports(run, tmp_path):
    before = json.loads((run / "result.json").read_text())
    (run / "result.json").unlink()
    path = tmp_path / "my.csv"
    options = settings(path, "data.options.columns.tags=list", "data.options.gauc=shop")
    again = succeed("train", "table", *options, "--out", run, "--resume", "--json").json
    assert again["tasks"] == before["tasks"]
    assert again["intervals"] == before["intervals"]
    assert succeed("evaluate", run, "--json").json["intervals"] == before["intervals"]
    assert succeed("flops", run, "--json").json["rows"][0]["total_flops"] > 0
    assert succeed("export", run, "--json").json["difference"] < 1e-5


@pytest.mark.parametrize("mixture", ["cgc", "ple"])
@pytest.mark.parametrize("gate", ["softmax", "topk+"])
def test_private_experts_train_with_any_gate(tmp_path, mixture, gate):
    path = write_table(customers(), tmp_path / "my.parquet")
    options = settings(path, f"model.mixture={mixture}", f"gate={gate}")
    result = succeed("train", "table", *options, "--out", tmp_path / "run", "--json").json
    assert result["status"] == "complete"
    assert set(TASKS) <= set(result["routing"])
    assert len(result["routing"]) == (9 if mixture == "ple" else 4)
    assert succeed("flops", tmp_path / "run", "--json").json["rows"][0]["gate_flops"] > 0


def test_weights_of_tasks_and_classes_are_settings(tmp_path):
    path = write_table(customers(), tmp_path / "my.parquet")
    weights = ["loss.weights={bought: 2, visits: 0.5}", "loss.weighting=uncertainty"]
    balanced = ["loss.class_weights={bought: balanced, segment: {high: 2.0}}"]
    options = settings(path, *weights, *balanced)
    result = succeed("train", "table", *options, "--out", tmp_path / "run", "--json").json
    assert all(metrics["log_variance"] != 0 for metrics in result["tasks"].values())
    assert result["tasks"]["bought"]["loss"] != pytest.approx(result["tasks"]["bought"]["log_loss"])
    for given, reason in (
        (["loss.weights={colour: 1}"], "there is no setting loss.weights.colour: the tasks are bought"),
        (["loss.class_weights={spend: balanced}"], "is for classes, not for regression"),
        (
            ["loss.class_weights={segment: {huge: 2}}"],
            "loss.class_weights.segment.huge: the classes are high",
        ),
        (["gate=hash"], "data.options.key"),
        (["gate=dense", "model.mixture=cgc"], "needs a gate"),
    ):
        assert reason in refusal("train", "table", *settings(path, *given))


def test_experts_are_reported_by_a_column_that_the_user_names(tmp_path):
    path = write_table(customers(), tmp_path / "my.csv")
    options = settings(path, "data.options.groups=shop")
    out = tmp_path / "run"
    result = succeed("train", "table", *options, "--out", out, "--json").json
    table = load_dataset(load_train_config("table", [option for option in options if "=" in option]))
    for task in TASKS:
        by_shop = result["routing"][task]["groups"]["shop"]
        assert sum(by_shop["samples"]) == len(table.test)
        assert set(by_shop["labels"]) <= {
            "missing",
            "unknown",
            "rare",
            *map(str, customers()["shop"].dropna()),
        }
        np.testing.assert_allclose(np.sum(by_shop["shares"], 1), 1, atol=1e-6)
    message = refusal(
        "train", "table", *settings(path, "data.options.groups=spend"), "--out", tmp_path / "no"
    )
    assert "cannot group rows by spend" in message


def test_a_hash_gate_routes_by_the_key_column(tmp_path):
    path = write_table(customers(), tmp_path / "my.parquet")
    options = settings(path, "gate=hash", "data.options.key=shop")
    assert (
        succeed("train", "table", *options, "--out", tmp_path / "run", "--json").json["experts_per_sample"]
        == 1
    )


def test_what_was_guessed_is_told_on_standard_error(tmp_path):
    path = tmp_path / "my.csv"
    path.write_bytes(customers().drop(columns="tags").to_csv(index=False, sep=";").encode("utf-16"))
    done = succeed("train", "table", *settings(path), "--out", tmp_path / "run", "--json")
    assert "is read as UTF-16" in done.err
    assert "with semicolons between its values" in done.err
    assert "column customer_id is left out" in done.err


@pytest.mark.slow
def test_tables_are_tuned(tmp_path):
    path = write_table(customers(), tmp_path / "my.parquet")
    given = ["data.options.targets=bought", *SHORT[1:4], "training.epochs=1"]
    options = sets([f"data.path={path}", *given])
    trials = ["--gates", "topk,dense", "--trials", "1", "--workers", "1"]
    succeed("tune", "table", *trials, *options, "--out", tmp_path / "study")
    rows = succeed("table", tmp_path / "study", "--json").json["rows"]
    assert {row["gate"] for row in rows} == {"topk", "dense"}
    succeed("report", tmp_path / "study", "-o", tmp_path / "page.html")
    assert "bought" in (tmp_path / "page.html").read_text()
