"""``comet-moe data inspect``: the schema of a table, warnings, and a recipe that trains."""

import json

import numpy as np
import pandas as pd
import yaml
from command import refusal, succeed

from made_tables import customers, write_table

SHORT = ["--set", "training.epochs=1"]


def inspect(path, *arguments):
    return succeed("data", "inspect", path, *arguments, "--json").json


def test_columns_have_kinds_roles_missing_shares_and_examples(tmp_path):
    table = customers()
    path = write_table(table, tmp_path / "my.parquet")
    report = inspect(path, "--targets", "bought,spend")
    columns = {column["name"]: column for column in report["columns"]}
    assert report["rows"] == 400
    assert (columns["bought"]["role"], columns["bought"]["kind"]) == ("target", "binary")
    assert (columns["spend"]["role"], columns["spend"]["kind"]) == ("target", "regression")
    assert columns["income"]["missing"] == table["income"].isna().mean()
    assert columns["city"]["examples"][0] == table["city"].mode()[0]
    assert columns["customer_id"]["role"] == "left out"
    shown = succeed("data", "inspect", path).out
    assert "my.parquet: 400 rows, 12 columns" in " ".join(shown.split())
    assert "categorical" in shown


def test_a_recipe_is_written_that_trains(tmp_path):
    path = write_table(customers().assign(note=1), tmp_path / "my.csv")
    recipe = tmp_path / "mine.yaml"
    options = ["--set", "columns={tags: list}", "--set", "gauc=shop"]
    assert inspect(path, "--targets", "bought,spend", "-o", recipe, *options)["recipe"] == str(recipe)
    written = yaml.safe_load(recipe.read_text())["data"]["options"]
    assert written["targets"] == {"bought": "binary", "spend": "regression"}
    assert written["columns"]["joined"] == "date"
    assert written["columns"]["tags"] == "list"
    assert written["exclude"] == ["customer_id", "note"]
    result = succeed("train", recipe, *SHORT, "--out", tmp_path / "run", "--json").json
    assert set(result["tasks"]) == {"bought", "spend"}
    assert "gauc" in result["tasks"]["bought"]


def test_columns_that_give_a_target_away_are_named(tmp_path):
    table = customers()
    table["paid"] = np.where(table["bought"] == 1, "yes", "no")
    table["cents"] = table["spend"] * 100
    table = table.sort_values("bought").assign(row_id=np.arange(len(table)))
    table["day"] = "31/01/2024"
    table.loc[::2, "day"] = "01/02/2024"
    warnings = inspect(write_table(table, tmp_path / "my.parquet"), "--targets", "bought,spend")["warnings"]
    text = "\n".join(warnings)
    assert "column paid determines the target bought" in text
    assert "column cents has the order of the target spend" in text
    assert (
        "column row_id identifies the rows" in text
        or "column row_id has the order of the target bought" in text
    )
    assert "column day looks like dates, such as '01/02/2024', but is read as categorical" in text
    assert not any(f"column {name} " in text for name in ("age", "city", "income", "member"))


def test_mistakes_are_one_sentence(tmp_path):
    path = write_table(customers(), tmp_path / "my.parquet")
    assert "has no column colour, which is to be a target" in refusal(
        "data", "inspect", path, "--targets", "colour"
    )
    assert "needs --targets" in refusal("data", "inspect", path, "-o", tmp_path / "mine.yaml")
    assert "does not exist" in refusal("data", "inspect", tmp_path / "none.csv")


def test_mixed_numbers_and_texts_are_a_warning(tmp_path):
    path = tmp_path / "my.csv"
    values = [*map(str, range(99)), "oops"]
    pd.DataFrame({"x": values, "z": ["a", "b"] * 50, "y": [0, 1] * 50}).to_csv(path, index=False)
    report = inspect(path, "--targets", "y")
    assert "'oops' in column x, data row 100" in json.dumps(report["warnings"])


def test_a_target_of_many_values_is_no_leak_of_itself(tmp_path):
    path = write_table(customers(2000), tmp_path / "my.csv")
    done = succeed("data", "inspect", path, "--targets", "bought,spend")
    assert "column spend" not in done.err + done.out
