"""The ``table`` recipe from the command line, on a table with every kind of column and task."""

import json

import pytest
from command import refusal, succeed
from raw_sets import sets

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
