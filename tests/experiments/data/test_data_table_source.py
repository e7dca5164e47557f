import csv

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.table.source import read_column_names, read_table


def write(folder, content, name="t.csv"):
    path = folder / name
    path.write_bytes(content)
    return path


# Any text that UTF-8 can hold, except what is not part of a value: spaces before it, and a NUL byte.
values = st.text(st.characters(codec="utf-8", exclude_characters="\0")).map(lambda text: text.lstrip(" \t"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("written")


@pytest.mark.parametrize(("name", "separator"), [("t.csv", ","), ("t.csv", ";"), ("t.tsv", "\t")])
@given(rows=st.lists(st.tuples(values, st.floats(allow_nan=False)), min_size=1, max_size=20))
def test_what_python_writes_as_csv_is_read_back(folder, name, separator, rows):
    path = folder / name
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=separator, quoting=csv.QUOTE_ALL)
        writer.writerow(["text", "unused", "number"])
        writer.writerows([text, "unused", number] for text, number in rows)
    table = read_table(path, ["text", "number"])
    assert table["text"].fillna("").tolist() == [text for text, _ in rows]
    assert table["number"].map(float).tolist() == [number for _, number in rows]


def test_only_the_wanted_columns_are_converted(tmp_path):
    path = write(tmp_path, b"user,note,rating\na,\xff\xfe,1\nb,,2\n")
    table = read_table(path, ["user", "rating"])
    assert table.to_dict("list") == {"user": ["a", "b"], "rating": ["1", "2"]}


def test_only_the_wanted_columns_of_a_parquet_file_are_read_with_their_types(tmp_path):
    frame = pd.DataFrame({"a": np.arange(3, dtype=np.int16), "b": ["x", "y", "z"], "c": [1.5, 2.5, 3.5]})
    frame.to_parquet(tmp_path / "t.parquet")
    table = read_table(tmp_path / "t.parquet", ["c", "a"])
    assert list(table) == ["c", "a"]
    assert table["a"].dtype == np.int16


def test_an_index_that_pandas_stored_in_a_parquet_file_is_a_column(tmp_path):
    frame = pd.DataFrame({"item": [7, 8]}, index=pd.Index(["b", "a"], name="user"))
    frame.to_parquet(tmp_path / "t.parquet")
    table = read_table(tmp_path / "t.parquet", ["user", "item"])
    assert table.to_dict("list") == {"user": ["b", "a"], "item": [7, 8]}


def test_texts_stay_texts_and_only_an_empty_value_is_missing(tmp_path):
    path = write(tmp_path, b'id,more\n007,1\nNA,1\n None,1\n"",1\n  ,1\n')
    ids = read_table(path, ["id"])["id"]
    assert ids[:3].tolist() == ["007", "NA", "None"]
    assert ids[3:].isna().all()


def test_column_names_are_without_spaces_quotes_and_byte_order_mark(tmp_path):
    assert read_column_names(write(tmp_path, b"\xef\xbb\xbfuser, item \na,b\n")) == ["user", "item"]
    assert read_column_names(write(tmp_path, b'"the ""user""",item\na,b\n')) == ['the "user"', "item"]


def test_a_column_name_may_go_over_two_lines(tmp_path):
    path = write(tmp_path, b'"the\nuser",rating\na,1\nb,2\n')
    assert read_column_names(path) == ["the\nuser", "rating"]
    assert read_table(path, ["the\nuser"])["the\nuser"].tolist() == ["a", "b"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_may_end_in_any_way(tmp_path, end):
    path = write(tmp_path, end.join([b"user,item", b"a,b", b"", b"c,d"]))
    assert read_table(path, ["item"])["item"].tolist() == ["b", "d"]


@pytest.mark.parametrize("header", [b"user,item,rating\n", b"user,item,rating,\n", b"user,item,rating,,\n"])
def test_separators_at_the_end_of_each_row_change_no_column(tmp_path, header):
    ends = b"," * max(1, header.count(b",") - 2)
    path = write(tmp_path, header + b"a,b,1" + ends + b"\nc,d,2" + ends + b"\n")
    assert read_table(path, ["item", "rating"])["item"].tolist() == ["b", "d"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\nuser,item,rating\na,b,1\n", "has an empty first line"),
        (b"user,item,rating", "has no rows"),
        (b"user,item,rating\n\n", "has no rows"),
        (b"user,item\na,b\n", "has no column rating; its columns are user, item"),
        (b"user,item,rating,item\na,b,1,c\n", "has more than one column item"),
        (b"user,item,rating\na,b,1\n\na,b\n", "has 2 values instead of 3 in data row 2"),
        (b"user,item,rating\na,b,1\na,b,c,2\n", "has 4 values instead of 3 in data row 2"),
        (b"user,item,rating\na,b,1,\na,b,1\n", "has 3 values instead of 4 in data row 2"),
        (
            b"user,item,rating\n" + b"a,b,1\n" * 300_000 + b"a,b,4,5\n",
            "has 4 values instead of 3 in data row 300001",
        ),
        (b"user,item,rating\na,b,1\na,\xe9,1\n", "has a value in column item, data row 2, that is not UTF-8"),
        (b"user,it\xe9m,rating\na,b,1\n", "is not UTF-8 text"),
        ("user,item,rating\na,b,1\n".encode("utf-16"), "is not UTF-8 text"),
        (
            b'user,item,rating\n"a,b,1\n' + b"a,b,1\n" * 400_000,
            "has a row of more than .* look for a quote that is never closed",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_an_unreadable_text_table_is_one_sentence_that_names_file_column_and_row(tmp_path, content, reason):
    path = write(tmp_path, content)
    with pytest.raises(DataError, match=rf"t\.csv {reason}") as caught:
        read_table(path, ["user", "item", "rating"])
    assert "\n" not in str(caught.value)


def test_a_truncated_parquet_file_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "t.parquet"
    pd.DataFrame({"a": range(100)}).to_parquet(path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError) as caught:
        read_table(path, ["a"])
    assert str(caught.value).count("t.parquet") == 1
    assert "is not a readable Parquet file (Parquet magic bytes not found" in str(caught.value)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ({"a": []}, "has no rows"),
        ({"b": [1]}, "has no column a; its columns are b"),
    ],
)
def test_a_parquet_file_without_rows_or_columns_is_an_error(tmp_path, frame, reason):
    pd.DataFrame(frame).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=reason):
        read_table(tmp_path / "t.parquet", ["a"])


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.parquet"])
def test_a_missing_file_and_a_folder_are_errors_that_give_the_reason(tmp_path, name):
    with pytest.raises(DataError, match=rf"{name} cannot be opened \(No such file or directory\)"):
        read_table(tmp_path / name, ["a"])
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=rf"{name} cannot be opened \(Is a directory\)"):
        read_table(tmp_path / name, ["a"])


def test_another_kind_of_file_is_an_error_that_lists_the_readable_kinds(tmp_path):
    with pytest.raises(DataError, match=r"ends in '\.txt'; give a \.csv, \.tsv or \.parquet table"):
        read_table(write(tmp_path, b"a\n1\n", "t.txt"), ["a"])
