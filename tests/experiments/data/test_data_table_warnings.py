"""What misleads in a table: copies of rows, which stay in one split, and columns that give a target away."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import prepare
from comet_moe.experiments.data.table import copies as table_copies
from comet_moe.experiments.data.table.copies import row_keys
from comet_moe.experiments.data.table.inspect import inspect_table


def write(table, path):
    table.to_csv(path, index=False)
    return path


def noise(rows=2000, seed=0):
    """A class that depends on a little, and a number, with the row's own noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=rows).round(6)
    return pd.DataFrame(
        {"x": x, "c": rng.integers(0, 6, rows), "y": (x + rng.logistic(size=rows) > 0).astype(int)}
    )


def warnings_of(table, tmp_path, **options):
    return inspect_table(write(table, tmp_path / "t.csv"), {"targets": ["y"], **options}).warnings


def test_copied_rows_are_counted_and_blame_no_column(tmp_path):
    table = pd.concat([noise(100)] * 6, ignore_index=True)
    assert warnings_of(table, tmp_path) == [
        "500 of 600 rows are copies of others: all copies of a row are in one split."
    ]


def test_rows_of_few_categories_are_equal_by_chance(tmp_path):
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.integers(0, 3, (600, 4)), columns=[*"abcy"])
    assert warnings_of(table, tmp_path) == []


@pytest.mark.parametrize("kept", [10**6, 200])
def test_all_copies_of_a_row_are_in_one_split_of_the_asked_size(tmp_path, monkeypatch, kept):
    monkeypatch.setattr(table_copies, "MAX_KEYS", kept)
    table = pd.concat([noise(2000)] * 3, ignore_index=True).sample(frac=1, random_state=0)
    dataset = prepare(
        "table", source=write(table, tmp_path / "t.csv"), cache=tmp_path / "cache", targets=["y"], seed=3
    )
    splits = {name: getattr(dataset, name) for name in ("train", "validation", "test")}
    rows = {name: {row.tobytes() for row in split.features["numeric"]} for name, split in splits.items()}
    assert not rows["train"] & rows["validation"] | rows["train"] & rows["test"]
    assert not rows["validation"] & rows["test"]
    # Exact to within one row where all keys are kept, else to within four standard errors of 70 %.
    limit = 3 if kept > 6000 else 4 * 6000 * np.sqrt(0.7 * 0.3 / 60)
    assert abs(len(splits["train"]) - 4200) <= limit
    assert "copies of others" in dataset.meta["warnings"][0]


def test_keys_are_equal_for_equal_rows_only():
    batch = pa.record_batch(
        {"a": [1.5, 1.5, 2.0, None], "b": ["x", "x", "x", None], "c": [["p"], ["p"], ["p", "q"], None]}
    )
    keys = row_keys(batch)
    assert keys[0] == keys[1]
    assert len(set(keys.tolist())) == 3
    swapped = pa.record_batch({"a": ["x", "y"], "b": ["y", "x"]})
    assert len(set(row_keys(swapped).tolist())) == 2


def test_a_column_that_ranks_the_classes_nearly_perfectly_is_a_leak(tmp_path):
    table = noise(4000)
    table["leak"] = (table["y"] + np.random.default_rng(1).normal(0, 0.24, len(table))).round(6)
    (warning,) = warnings_of(table, tmp_path)
    assert warning.startswith("column leak determines the target y (nearly) alone (AUC 0.99")


@pytest.mark.parametrize("kind", ["texts", "bins", "classes"])
def test_a_column_gives_a_target_away_in_other_words(tmp_path, kind):
    table = noise(4000)
    if kind == "texts":
        table["leak"] = np.where(table["y"] == 1, "paid", "open")
    elif kind == "bins":  # without the order of the target
        table["leak"] = np.where(table["y"] == 1, table["x"] + 20, table["x"] - 20) ** 2 * (
            1 - 2 * table["y"]
        )
    else:
        table["y"] = table["c"].map("abcdef".__getitem__)
        table = table.rename(columns={"c": "leak"})
    (warning,) = warnings_of(table, tmp_path)
    assert "column leak " in warning


def test_few_rows_of_a_class_make_no_leak(tmp_path):
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"x": rng.integers(0, 700, 4000), "y": [1] * 4 + [0] * 3996})
    assert warnings_of(table, tmp_path) == []


def test_a_prepared_table_has_the_warnings_of_an_inspected_one(tmp_path):
    table = noise(600)
    table["paid"] = np.where(table["y"] == 1, "yes", "no")
    table["const"] = 7
    table["when"] = [f"{1 + row % 28:02d}/{1 + row // 28:02d}/2024" for row in range(600)]
    table["customer_id"] = np.argsort(np.argsort(table["y"], kind="stable")) + 1000  # the order of y
    table["serial"] = [f"S{row:05}" for row in range(600)]
    warnings = warnings_of(table, tmp_path)
    dataset = prepare("table", source=tmp_path / "t.csv", cache=tmp_path / "cache", targets=["y"])
    assert dataset.meta["warnings"] == warnings
    for expected in (
        "column paid determines the target y (nearly) alone (AUC 1.000)",
        "column customer_id has the order of the target y",
        "column const is left out: it has one value only, '7'.",
        "column when looks like dates, such as '01/01/2024', but is left out",
        "column serial is left out: nearly every row has a text of its own.",
    ):
        assert any(line.startswith(expected) for line in warnings), expected
    assert len(warnings) == 6  # and that customer_id is left out


def test_many_columns_that_are_left_out_are_one_warning(tmp_path):
    table = noise(50).assign(**{f"empty{index}": "" for index in range(100)})
    lines = [line for line in warnings_of(table, tmp_path) if "left out" in line]
    assert len(lines) == 21
    assert lines[-1].startswith("80 other columns are left out for such reasons: empty20, empty21,")


def test_a_message_of_a_wide_table_does_not_list_all_columns(tmp_path):
    table = noise(50).assign(**{f"income_{index}": 1.5 for index in range(500)})
    write(table, tmp_path / "t.csv")
    with pytest.raises(DataError, match=r"did you mean income_7\? Its columns.*\(503 in all\)") as error:
        prepare("table", source=tmp_path / "t.csv", cache=tmp_path / "cache", targets=["incom_7"])
    assert len(str(error.value)) < 1200
