"""Tables of any columns: what is prepared of them, in which split, and what is refused."""

import codecs
import gzip

import numpy as np
import pandas as pd
import pytest
import torch

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import prepare
from comet_moe.experiments.data.table.schema import FIRST_CATEGORY, MISSING, RARE, UNKNOWN, TableSchema
from comet_moe.experiments.models.table_inputs import PiecewiseLinearEmbeddings, ScaledNumbers
from made_tables import TASKS, as_text, customers, write_table


def build(path, store, targets=TASKS, split="random", **options):
    return prepare("table", source=path, cache=store, split=split, targets=targets, **options)


def schema_of(dataset):
    return TableSchema.model_validate(dataset.meta["table"])


def feature(dataset, name):
    (found,) = [own for own in schema_of(dataset).features if own.name == name]
    return found


def column(dataset, name, split="train"):
    """The array of one feature."""
    schema, own = schema_of(dataset), feature(dataset, name)
    array = "categorical" if own.kind == "categorical" else "numeric"
    return getattr(dataset, split).features[array][:, schema.of_kind(own.kind).index(own)]


@pytest.fixture
def table():
    return customers(600)


@pytest.fixture
def path(table, tmp_path):
    return write_table(table, tmp_path / "my.parquet")


def test_kinds_of_columns_follow_from_their_values(path, store):
    dataset = build(path, store)
    kinds = {own.name: own.kind for own in schema_of(dataset).features}
    assert kinds == {
        "age": "numeric",
        "city": "categorical",
        "income": "numeric",
        "joined.days": "numeric",
        "joined.month": "categorical",
        "joined.weekday": "categorical",
        "joined.hour": "categorical",
        "tags": "list",
        "member": "categorical",
        "shop": "categorical",
    }
    assert any(
        "customer_id is left out: nearly every row has an id" in line for line in dataset.meta["warnings"]
    )


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_text_and_parquet_give_the_same_arrays(table, path, store, suffix, tmp_path):
    text = build(write_table(table, tmp_path / f"text{suffix}"), store, columns={"tags": "list"})
    typed = build(path, store)
    for split in ("train", "validation", "test"):
        for kind in ("features", "targets"):
            ours, theirs = getattr(getattr(text, split), kind), getattr(getattr(typed, split), kind)
            assert ours.keys() == theirs.keys()
            for name in ours:
                np.testing.assert_array_equal(ours[name], theirs[name])


def test_arrays_hold_the_rows_of_the_table(table, path, store):
    dataset = build(path, store)
    cities = feature(dataset, "city").categories
    rows = []
    for split in ("train", "validation", "test"):
        codes, ages = column(dataset, "city", split), column(dataset, "age", split)
        targets = getattr(dataset, split).targets["bought"]
        rows += [
            (cities[code - FIRST_CATEGORY], age, own)
            for code, age, own in zip(codes, ages, targets, strict=True)
        ]
    assert sorted(rows) == sorted(zip(table["city"], table["age"], table["bought"], strict=True))


def test_missing_numbers_are_nan_and_missing_targets_too(table, path, store):
    dataset = build(path, store)
    splits = ("train", "validation", "test")
    assert (
        sum(np.isnan(column(dataset, "income", split)).sum() for split in splits)
        == table["income"].isna().sum()
    )
    spend = np.concatenate([getattr(dataset, split).targets["spend"] for split in splits])
    assert np.isnan(spend).sum() == table["spend"].isna().sum()
    train = dataset.train.targets["spend"]
    assert abs(np.nanmean(train)) < 1e-5  # standardised in float32
    assert abs(np.nanstd(train) - 1) < 1e-5


def test_a_list_is_padded_and_an_empty_one_is_missing(table, path, store):
    dataset = build(path, store)
    lists, tags = dataset.train.features["lists"], feature(dataset, "tags")
    assert tags.length == table["tags"].map(len).max()
    assert set(np.unique(lists[:, 0])) <= {MISSING, *range(FIRST_CATEGORY, tags.num_codes)}
    empty = lists[lists[:, 0] == MISSING]
    assert len(empty)
    assert (empty[:, 1:] == -1).all()


def test_rare_categories_are_pooled_and_those_of_other_splits_are_unknown(store, tmp_path):
    train = pd.DataFrame({"city": ["a"] * 20 + ["b"] * 20 + ["c"] * 2, "y": [0, 1] * 21})
    test = pd.DataFrame({"city": ["a", "c", "never", None] * 3, "y": [0, 1] * 6})
    paths = {name: tmp_path / f"{name}.csv" for name in ("train", "test")}
    train.to_csv(paths["train"], index=False)
    test.to_csv(paths["test"], index=False)
    dataset = build(
        paths["train"], store, targets=["y"], test=str(paths["test"]), validation=str(paths["test"])
    )
    assert feature(dataset, "city").categories == ["a", "b"]
    assert dataset.meta["rows"] == {"train": 42, "validation": 12, "test": 12}
    assert column(dataset, "city", "test").tolist() == [FIRST_CATEGORY, RARE, UNKNOWN, MISSING] * 3


def test_several_files_are_one_table(table, path, store, tmp_path):
    whole = build(path, store)
    folder = tmp_path / "parts"
    folder.mkdir()
    table.iloc[:250].to_parquet(folder / "a.parquet", index=False)
    table.iloc[250:][table.columns[::-1]].to_parquet(folder / "b.parquet", index=False)
    for source in (folder, folder / "*.parquet"):
        parts = build(source, store)
        np.testing.assert_array_equal(
            parts.train.features["categorical"], whole.train.features["categorical"]
        )


def test_encodings_and_separators_are_guessed_and_told(table, store, tmp_path):
    text = as_text(table).to_csv(index=False)
    first = None
    for name, content, note in (
        ("plain", text.encode(), None),
        ("mark", codecs.BOM_UTF8 + text.encode(), "byte order mark"),
        ("wide", text.encode("utf-16"), "read as UTF-16"),
        ("semicolon", as_text(table).to_csv(index=False, sep=";").encode(), "with semicolons between"),
        ("tab", as_text(table).to_csv(index=False, sep="\t").encode(), "with tabs between"),
    ):
        path = tmp_path / f"{name}.csv"
        path.write_bytes(content)
        dataset = build(path, store, columns={"tags": "list"})
        first = first or dataset
        np.testing.assert_array_equal(
            dataset.train.features["categorical"], first.train.features["categorical"]
        )
        assert note is None or any(note in own for own in dataset.meta["notes"])
    named = tmp_path / "named.csv"
    named.write_bytes(text.encode("cp1252"))
    assert feature(build(named, store, encoding="cp1252"), "city").categories[2] == "Genève"


def test_quoted_newlines_and_separators_belong_to_the_value(store, tmp_path):
    path = tmp_path / "my.csv"
    pd.DataFrame({"text": ["two\nlines", "a,b"] * 30, "y": [0, 1] * 30}).to_csv(path, index=False)
    assert feature(build(path, store, targets=["y"]), "text").categories == ["a,b", "two\nlines"]


def test_infinite_numbers_count_as_missing_and_are_told(store, tmp_path):
    path = tmp_path / "my.parquet"
    values = np.r_[np.linspace(0, 1, 58), np.inf, -np.inf]
    pd.DataFrame({"x": values, "y": [0, 1] * 30}).to_parquet(path)
    dataset = build(path, store, targets=["y"])
    arrays = [getattr(dataset, split).features["numeric"] for split in ("train", "validation", "test")]
    assert sum(np.isnan(array).sum() for array in arrays) == 2
    assert not any(np.isinf(array).any() for array in arrays)


def test_huge_and_tiny_numbers_give_finite_outputs(store, tmp_path):
    path = tmp_path / "my.parquet"
    noise = np.random.default_rng(0).normal(size=60)
    pd.DataFrame({"huge": noise * 1e300, "tiny": noise * 1e-300, "y": [0, 1] * 30}).to_parquet(path)
    dataset = build(path, store, targets=["y"])
    numbers = torch.from_numpy(dataset.train.features["numeric"].copy())
    assert numbers.isfinite().all()
    features = schema_of(dataset).features
    for module in (
        PiecewiseLinearEmbeddings([own.edges for own in features], width=4),
        ScaledNumbers([own.median for own in features], [own.scale for own in features]),
    ):
        assert module(numbers).isfinite().all()


def test_commas_are_decimal_points_in_a_file_with_semicolons(store, tmp_path):
    path = tmp_path / "my.csv"
    values = np.linspace(-1, 1, 60).round(3)
    pd.DataFrame({"x": values, "y": [0, 1] * 30}).to_csv(path, index=False, sep=";", decimal=",")
    dataset = build(path, store, targets=["y"])
    assert feature(dataset, "x").kind == "numeric"
    arrays = [getattr(dataset, split).features["numeric"] for split in ("train", "validation", "test")]
    assert sorted(np.concatenate(arrays)[:, 0]) == sorted(values.astype(np.float32))
    assert any("commas as decimal points" in note for note in dataset.meta["notes"])


def test_a_target_may_have_any_name(table, store, tmp_path):
    renamed = table.rename(columns={"bought": "numeric", "segment": "a/b: c"})
    path = write_table(renamed, tmp_path / "my.parquet")
    dataset = build(path, store, targets=["numeric", "a/b: c"])
    assert set(np.unique(dataset.train.targets["numeric"])) == {0, 1}
    assert dataset.train.targets["a/b: c"].shape == (420,)
    assert dataset.train.features["numeric"].shape == (420, 4)


def test_a_column_may_have_a_number_as_its_name(store, tmp_path):
    path = tmp_path / "my.csv"
    path.write_text("2023,2024\n" + "1.5,0\n2.5,1\n" * 30)
    assert list(build(path, store, targets=2024).train.targets) == ["2024"]


def test_a_table_for_testing_must_have_the_classes_of_the_train_table(store, tmp_path):
    paths = [tmp_path / name for name in ("train.csv", "test.csv")]
    for path, classes in zip(paths, ("ab", "ac"), strict=True):
        pd.DataFrame({"x": np.arange(60) / 7, "y": list(classes) * 30}).to_csv(path, index=False)
    with pytest.raises(
        DataError, match="the target y has the class 'c', which is not among those to train on: a, b"
    ):
        build(paths[0], store, targets=["y"], test=str(paths[1]))


def test_columns_of_other_types_are_left_out_or_refused(store, tmp_path):
    path = tmp_path / "my.parquet"
    frame = {"x": np.arange(60) / 7, "raw": [b"bytes"] * 60, "tags": [["a"], ["b"]] * 30, "y": [0, 1] * 30}
    pd.DataFrame(frame).to_parquet(path)
    dataset = build(path, store, targets=["y"])
    assert schema_of(dataset).feature_columns == ["x", "tags"]
    for options, reason in (
        ({"columns": {"tags": "categorical"}}, "has values that are lists in column tags"),
        ({"columns": {"raw": "categorical"}}, "of a type that is neither number, text"),
        (
            {"split": "group", "group": "tags"},
            "has lists or bytes in column tags, which the option group names",
        ),
        ({"gauc": "tags"}, "has lists or bytes in column tags, which the option gauc names"),
        ({"targets": ["tags"]}, "has lists or bytes as target tags"),
    ):
        with pytest.raises(DataError, match=reason):
            build(path, store, **{"targets": ["y"], **options})


# Splits


def test_random_splits_have_the_asked_sizes_and_depend_on_the_seed(path, store):
    dataset = build(path, store)
    assert dataset.meta["rows"] == {"train": 420, "validation": 90, "test": 90}
    other = prepare("table", source=path, cache=store, seed=1, targets=TASKS, shares=[0.5, 0.25, 0.25])
    assert other.meta["rows"] == {"train": 300, "validation": 150, "test": 150}


def test_a_stratified_split_has_the_share_of_each_class_in_every_split(table, path, store):
    dataset = build(path, store, split="stratified", stratify="segment")
    share = (table["segment"] == "high").mean()
    high = schema_of(dataset).targets[1].classes.index("high")
    for split in (dataset.train, dataset.validation, dataset.test):
        assert abs((split.targets["segment"] == high).sum() - share * len(split)) <= 2  # one row per class


def test_no_group_is_in_two_splits(path, store):
    dataset = build(path, store, split="group", group="shop", gauc="shop")
    splits = (dataset.train, dataset.validation, dataset.test)
    groups = [set(split.features["group"].tolist()) for split in splits]
    assert all(groups)
    assert len(set.union(*groups)) == 12
    assert not groups[0] & groups[1] | groups[0] & groups[2] | groups[1] & groups[2]


def test_a_group_column_is_no_feature_unless_it_is_named(path, store):
    dataset = build(path, store, split="group", group="shop")
    assert "shop" not in schema_of(dataset).feature_columns


def test_a_split_by_time_puts_the_latest_rows_into_test(path, store):
    dataset = build(path, store, split="time", time="joined", columns={"joined": "date"})
    days = [column(dataset, "joined.days", split) for split in ("train", "validation", "test")]
    assert days[0].max() < days[1].min() <= days[1].max() < days[2].min()


def test_codes_with_numbers_and_texts_are_categories(store, tmp_path):
    codes = [*(str(98000 + row % 50) for row in range(98)), "98107-2117", "98107-2117"]
    path = tmp_path / "my.csv"
    pd.DataFrame({"zip_code": codes, "y": [0, 1] * 50}).to_csv(path, index=False)
    assert feature(build(path, store, targets=["y"]), "zip_code").kind == "categorical"


# Bad input


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


ROWS = "".join(f"{7 * i},{'ab'[i % 2]},{i % 2}\n" for i in range(60))


@pytest.mark.parametrize(
    ("content", "options", "reason"),
    [
        ("", {}, "is empty; give a table whose first line names its columns"),
        ("x,z,y\n", {}, "has no rows; at least one is needed"),
        ("x,x,y\n" + ROWS, {}, "has more than one column x; rename the others"),
        (
            "x,z,y\n" + ROWS,
            {"targets": ["w"]},
            "has no column w, which is to be a target; its columns are x, z, y",
        ),
        ("x,z,y\n" + "1,a,1\n" * 50, {}, "has one value only, '1', as target y; there is nothing to predict"),
        ("x,z,y\n" + "1,a,\n2,b,\n" * 30, {}, "has no value of the target y; all 60 rows are empty"),
        (
            "x,z,y\n" + ROWS + "3,a,maybe\n",
            {},
            "has numbers and texts such as 'maybe' (data row 61) as target y",
        ),
        (
            "x,z,y\n" + ROWS + "oops,a,1\n",
            {},
            "has 'oops' in column x, data row 61, where 60 of 61 values are numbers",
        ),
        ("x,z,y\n" + ROWS + "1,a\n", {}, "has 2 values instead of 3 in data row 61"),
        (
            b"x,z,y\n" + ROWS.encode() + b"1,\xff\xfe,1\n",
            {},
            "has a value in column z, data row 61, that is not UTF-8",
        ),
        (bytes(range(256)) * 10, {}, "is not UTF-8 text"),
        (
            "x,z,y\n" + ROWS,
            {"targets": ["x"], "columns": {"x": "numeric"}},
            "x is a target and cannot be a feature",
        ),
        (
            "x,z,y\n" + ROWS,
            {"targets": {"x": "multiclass"}},
            "has 60 classes as target x in 60 rows, too many",
        ),
        (
            "x,z,y\n" + ROWS,
            {"targets": {"x": "binary"}},
            "has 60 distinct values as target x, where a binary one has 2",
        ),
        (
            "x,z,y\n" + ROWS,
            {"targets": {"z": "count"}},
            "has 'a' in column z, data row 1; a target of kind count",
        ),
        (
            "x,z,y\n" + ROWS,
            {"targets": {"z": {"positive": "c"}}},
            "has no value 'c' in column z; its values are a, b",
        ),
        ("x,z,y\n" + ROWS, {"exclude": ["x", "z"]}, "has no column left as a feature"),
        ("x,z,y\n" + ROWS, {"exclude": "w"}, "has no column w, which the option exclude names"),
        ("x,z,y\n" + ROWS, {"columns": {"x": "number"}}, "option columns.x: Input should be 'categorical'"),
        ("x,z,y\n" + ROWS, {"shares": [0.9, 0.1, 0.1]}, "must be three positive numbers that sum to 1"),
        ("x,z,y\n" + ROWS, {"encoding": "utf-99"}, "option encoding is 'utf-99'"),
        ("x,z,y\n1,a,0\n2,b,1\n", {}, "has 2 rows, which leave none for the"),
        ("x,z,y\n" + ROWS, {"split": "group"}, "needs the option group"),
        ("x,z,y\n" + ROWS, {"split": "group", "group": "w"}, "has no column w, which the option group names"),
        ("x,z,y\n" + ROWS, {"split": "group", "group": "z"}, "has 2 distinct values in the group column z"),
        ("x,z,y\n" + ROWS, {"split": "time", "time": "z"}, "has no readable time in column z, data row 1"),
        ("x,z,y\n" + ROWS, {"split": "time", "time": "y"}, "too few distinct times in column y"),
        ("x,z,y\n" + ROWS, {"test": "nowhere.csv"}, "nowhere.csv does not exist"),
        ("x,z,y\n" + ROWS, {"columns": {"z": "numeric"}}, "has values such as 'a' and no number in column z"),
        ("x,z,y\n" + ROWS, {"columns": {"x": "date"}}, "has values that are not dates such as 2024-01-31"),
        (
            "x,z,y\n" + ROWS,
            {"targets": {"x": "regression"}, "split": "stratified"},
            "needs the option stratify",
        ),
        (
            "x,z,y\n" + ROWS + "1,a,1e200\n",
            {"targets": {"y": "regression"}},
            "has numbers above 1e+100 as target y",
        ),
        ("x,z,y\n" + ROWS + "1,a,inf\n", {}, "has 1 infinite values as target y"),
        ("x,z,y\n" + ROWS, {"targets": None}, "needs the names of its targets"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, store, content, options, reason):
    path = write(tmp_path / "my.csv", content)
    with pytest.raises(DataError) as error:
        build(path, store, **{"targets": ["y"], **options})
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(store.glob("*"))


def test_files_that_are_no_tables_are_refused(tmp_path, store):
    for name, content in (("my.parquet", b"PAR1 nothing"), ("my.csv", gzip.compress(ROWS.encode()))):
        with pytest.raises(DataError, match=r"my\.(parquet|csv) is not"):
            build(write(tmp_path / name, content), store, targets=["y"])
    with pytest.raises(DataError, match=r"is a spreadsheet; save its sheet as .csv"):
        build(write(tmp_path / "my.xlsx", b""), store, targets=["y"])
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"none has no .csv, .tsv or .parquet file"):
        build(tmp_path / "none", store, targets=["y"])


def test_text_in_a_numeric_column_counts_as_missing_where_that_is_asked_for(tmp_path, store):
    path = write(tmp_path / "my.csv", "x,z,y\n" + ROWS + "oops,a,1\n")
    dataset = build(path, store, targets=["y"], columns={"x": "numeric"})
    assert any("1 texts that are not numbers and count as missing" in note for note in dataset.meta["notes"])
