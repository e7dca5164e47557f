"""Tables as users have them: separators, names of files, dates, constants, other types, rare classes."""

import numpy as np
import pyarrow as pa
import pytest

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.table.encode import Encoder
from comet_moe.experiments.data.table.inspect import inspect_table
from comet_moe.experiments.data.table.schema import Feature, TableSchema
from comet_moe.experiments.data.table.source import TableSource, find_tables
from comet_moe.experiments.models import Task
from comet_moe.experiments.training.boosted_trees import FAMILY
from comet_moe.experiments.training.families import FitData


def test_vertical_bars_are_recognised_and_told(tmp_path):
    (tmp_path / "t.csv").write_text("a|b\n1|x,y\n2|z\n")
    source = TableSource(find_tables(tmp_path / "t.csv"))
    assert source.columns == ["a", "b"]
    assert next(source.batches()).column("b").to_pylist() == ["x,y", "z"]
    assert source.notes == ["t.csv is read with vertical bars between its values, as in its first line"]


def test_the_ending_of_a_file_may_be_in_capitals(tmp_path):
    (tmp_path / "T.CSV").write_text("a,b\n1,2\n")
    for path in (tmp_path / "T.CSV", tmp_path):
        assert TableSource(find_tables(path)).columns == ["a", "b"]


@pytest.mark.parametrize("content", ["größe,b\n1,2\n", "a,b\n1,größe\n"])
def test_text_of_another_encoding_is_an_error_that_names_the_option(tmp_path, content):
    path = tmp_path / "t.csv"
    path.write_bytes(content.encode("cp1252"))
    with pytest.raises(DataError, match=r"not UTF-8.*, or name its encoding, such as cp1252, by the option"):
        list(TableSource([path]).batches())
    assert next(TableSource([path], encoding="cp1252").batches()).num_rows == 1


def test_constant_columns_and_dates_that_differ_in_every_row_are_warned_of(tmp_path):
    rows = [f"{i % 2},7,{1 + i % 28:02d}/{1 + i // 28:02d}/2024 10:{i % 60:02d},{i % 5}" for i in range(100)]
    (tmp_path / "t.csv").write_text("\n".join(["y,c,when,x", *rows]))
    report = inspect_table(tmp_path / "t.csv", {"targets": ["y"]})
    assert report.warnings == [
        "column c is left out: it has one value only, '7'.",
        "column when looks like dates, such as '01/01/2024 10:00', but is left out: write them as 2024-01-31 "
        "for parts of dates.",
    ]
    assert inspect_table(tmp_path / "t.csv", {"targets": ["y"], "exclude": ["c", "when"]}).warnings == []


@pytest.mark.parametrize("kind", ["categorical", "numeric"])
def test_lists_in_place_of_the_values_of_the_training_are_refused(kind):
    encoder = Encoder(TableSchema(features=[Feature(name="a", column="a", kind=kind)], targets=[]))
    with pytest.raises(DataError, match=rf"column a has values of type list.* a {kind} feature; give single"):
        encoder.features(pa.record_batch({"a": [[1.0], [2.0]]}))


@pytest.mark.parametrize("held_out", [[0.0, 2.0, 1.0], [2.0, 2.0, np.nan]])
def test_boosted_trees_pass_over_classes_that_only_validation_rows_have(held_out):
    task = Task("y", "multiclass", 1.0, outputs=3, has_missing=True)
    schema = TableSchema(features=[Feature(name="a", column="a", kind="numeric")], targets=[])
    inputs, held_out_inputs = (np.arange(rows, dtype=float)[:, None] for rows in (40, 3))
    data = FitData(inputs, np.array([0.0, 1.0] * 20), held_out_inputs, np.array(held_out)).present()
    model, _ = FAMILY.fit(task, data, schema, None)
    assert FAMILY.outputs(task, model, held_out_inputs).shape == (3, 3)
