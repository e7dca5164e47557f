"""Numbers as people write them, columns that number the rows, and compressed files."""

import gzip

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import prepare
from comet_moe.experiments.data.table.scan import ColumnScan
from comet_moe.experiments.data.table.source import TableSource, find_tables
from comet_moe.experiments.data.table.values import numbers_of


def scan(*batches, **options):
    found = ColumnScan("x", **options)
    for batch in batches:
        found.add(pa.array(batch))
    return found.number


@pytest.mark.parametrize(
    ("text", "decimal", "number"),
    [
        ("984,000", ".", 984_000),
        ("$1,234.00", ".", 1234),
        ("-€5", ".", -5),
        ("40%", ".", 40),
        ("1'234'567.5", ".", 1_234_567.5),
        ("1.234,5", ",", 1234.5),
        ("1.234", ",", 1234),
        ("0,5", ",", 0.5),
        ("12 €", ",", 12),
        ("1e3", ".", 1000),
        ("12,34", ".", None),
        ("0,123", ".", None),
        ("1,2,3", ".", None),
        ("12.5", ",", None),
        ("12 apples", ".", None),
    ],
)
def test_separators_currencies_and_per_cent_are_read_over(text, decimal, number):
    (found,) = numbers_of([text], decimal)
    assert found == number or (number is None and np.isnan(found))


@given(st.lists(st.floats(-1e9, 1e9).map(lambda value: round(value, 2)), min_size=1), st.sampled_from(".,"))
def test_a_column_is_read_as_it_was_written(values, decimal):
    swap = {".": "", ",": str.maketrans(".,", ",.")}[decimal]
    texts = [f"{value:,.2f}".translate(swap) if swap else f"{value:,.2f}" for value in values]
    found = scan(texts)
    assert found.decimal == decimal or found.texts == 0
    np.testing.assert_array_equal(numbers_of(texts, decimal), values)


def test_the_decimal_mark_is_that_which_leaves_no_text():
    assert scan(["1,5", "2,25", "7"]).decimal == ","
    assert scan(["1,500", "2,250"]).decimal == "."  # both could be meant
    assert scan(["1,500", "2,250"], expects_comma=True).decimal == ","
    assert scan(["7", "8"], expects_comma=True).decimal == "."
    late = scan(["7", "8"], ["1.234,5", "9"])
    assert (late.decimal, late.numbers, late.texts) == (",", 4, 0)
    assert scan(["0.5", "1.25"], ["1,5"]).decimal == "."
    assert scan(["a", "1,5"]).texts == 1


def table(path, rows=200):
    rng = np.random.default_rng(0)
    price = rng.integers(1000, 10**6, rows)
    frame = pd.DataFrame(
        {
            "": np.arange(rows),
            "price": [f"${value:,}.00" for value in price],
            "tax": [f"{value}%" for value in price % 97],
            "y": [f"{value / 2:,.1f}" for value in price],
        }
    )
    frame.to_csv(path, index=False)
    return price


def test_written_numbers_are_features_and_targets_and_notes_say_what_was_read(tmp_path):
    price = table(tmp_path / "t.csv")
    dataset = prepare("table", source=tmp_path / "t.csv", cache=tmp_path / "cache", targets=["y"])
    features = dataset.meta["table"]["features"]
    assert [(own["name"], own["kind"]) for own in features] == [("price", "numeric"), ("tax", "numeric")]
    target = dataset.meta["table"]["targets"][0]
    assert target["kind"] == "regression"
    rows = np.concatenate([split.features["numeric"] for split in (dataset.train, dataset.test)])
    assert set(rows[:, 0].astype(int)) <= set(price)
    notes = "\n".join(dataset.meta["notes"])
    assert f"column price has numbers such as '${price[0]:,}.00', which is read as {price[0]}" in notes
    assert "column  is left out: nearly every row has an id of its own." in dataset.meta["warnings"]


def test_a_column_that_numbers_the_rows_is_an_id_in_any_order(tmp_path):
    rng = np.random.default_rng(0)
    rows = {"n": rng.permutation(300) + 1, "x": rng.integers(0, 500, 300), "y": rng.integers(0, 2, 300)}
    pd.DataFrame(rows).to_csv(tmp_path / "t.csv", index=False)
    dataset = prepare("table", source=tmp_path / "t.csv", cache=tmp_path / "cache", targets=["y"])
    assert [own["name"] for own in dataset.meta["table"]["features"]] == ["x"]
    assert "column n is left out: it numbers the rows." in dataset.meta["warnings"]


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2"])
def test_compressed_text_is_read_as_it_is(tmp_path, suffix):
    table(tmp_path / "t.csv")
    compressed = tmp_path / f"t.csv{suffix}"
    names = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
    with pa.output_stream(compressed, compression=names[suffix]) as file:
        file.write((tmp_path / "t.csv").read_bytes())
    plain, read = (TableSource(find_tables(path)) for path in (tmp_path / "t.csv", compressed))
    assert list(read.batches()) == list(plain.batches())


def test_damaged_compression_and_spreadsheets_are_one_sentence(tmp_path):
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"a,b\n1,2\n" * 1000)[:40])
    with pytest.raises(DataError, match="is not a readable"):
        list(TableSource([tmp_path / "t.csv.gz"]).batches())
    (tmp_path / "t.xlsx").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"is a spreadsheet; save its sheet as \.csv"):
        find_tables(tmp_path / "t.xlsx")
