import numpy as np
import pandas as pd
import pytest

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import prepare, read_pairs


def make_table(users=12, items=10):
    pairs = [
        (f"u-{user}", f"é {item}") for user in range(users) for item in range(items) if (user + item) % 3
    ]
    rating = [1 + 0.5 * (number % 9) for number in range(len(pairs))]
    return pd.DataFrame({"user": [p[0] for p in pairs], "item": [p[1] for p in pairs], "rating": rating})


def parts(dataset):
    return dataset.train, dataset.validation, dataset.test


@pytest.mark.parametrize("kind", ["csv", "semicolon", "tsv", "parquet"])
def test_a_table_of_any_format_with_text_ids_becomes_two_tasks(tmp_path, kind):
    table = make_table()
    path = tmp_path / f"my.{'csv' if kind == 'semicolon' else kind}"
    if kind == "parquet":
        table.to_parquet(path)
    else:
        table.to_csv(path, sep={"csv": ",", "semicolon": ";", "tsv": "\t"}[kind], index=False)
    dataset = prepare("ratings", source=path, cache=tmp_path / "c")
    users, items = dataset.vocabulary("user"), dataset.vocabulary("item")
    rated, pairs = set(), []
    for part in parts(dataset):
        for user, item, watched, rating in zip(
            *part.features.values(), part.targets["watched"], part.targets["rating"], strict=True
        ):
            pairs.append((user, item))
            if watched:
                rated.add((users.ids[user], items.ids[item], float(rating)))
    assert rated == set(table.itertuples(index=False, name=None))
    assert len(set(pairs)) == len(pairs)
    per_user = np.bincount(users.encode(table["user"]))
    assert len(pairs) == len(table) + np.minimum(per_user, len(items) - per_user).sum()
    assert len(dataset.train) == 8 * len(pairs) // 10


def test_without_negatives_only_rated_pairs_are_rows(tmp_path):
    make_table().to_csv(tmp_path / "my.csv", index=False)
    dataset = prepare("ratings", source=tmp_path / "my.csv", cache=tmp_path / "c", negatives=False)
    assert sum(map(len, parts(dataset))) == len(make_table())
    assert all(part.targets["watched"].all() for part in parts(dataset))


def test_tables_at_two_paths_have_two_folders_in_the_cache(tmp_path):
    for name, users in (("a", 12), ("b", 20)):
        make_table(users).to_csv(tmp_path / f"{name}.csv", index=False)
    sizes = {
        prepare("ratings", source=tmp_path / f"{name}.csv", cache=tmp_path / "c").meta["num_users"]
        for name in "aba"
    }
    assert sizes == {12, 20}


def test_columns_are_found_by_common_names_or_by_option(tmp_path):
    table = make_table()
    table.set_axis(["User-ID", "ISBN", "Book-Rating"], axis=1).to_csv(tmp_path / "common.csv", index=False)
    assert list(read_pairs(tmp_path / "common.csv")) == ["user", "item", "rating"]
    table.set_axis(["who", "what", "liked"], axis=1).to_csv(tmp_path / "own.csv", index=False)
    named = read_pairs(tmp_path / "own.csv", {"user": "who", "item": "what", "rating": "liked"})
    assert named["user"].tolist() == table["user"].tolist()
    dataset = prepare(
        "ratings", source=tmp_path / "own.csv", cache=tmp_path / "c", user="who", item="what", rating="liked"
    )
    assert dataset.meta["num_users"] == 12


def test_ids_stay_text_and_na_is_an_id(tmp_path):
    (tmp_path / "t.csv").write_text("user,item\n007,NA\n7, None\n")
    table = read_pairs(tmp_path / "t.csv")
    assert table["user"].tolist() == ["007", "7"]
    assert table["item"].tolist() == ["NA", "None"]


def test_the_last_row_of_a_repeated_pair_is_kept_and_a_note_says_so(tmp_path):
    table = make_table()
    again = table.iloc[[0]].assign(rating=4.75)
    pd.concat([table, again]).to_csv(tmp_path / "my.csv", index=False)
    dataset = prepare("ratings", source=tmp_path / "my.csv", cache=tmp_path / "c", negatives=False)
    assert sum(map(len, parts(dataset))) == len(table)
    assert any((part.targets["rating"] == 4.75).any() for part in parts(dataset))
    assert any("1 rows repeat a pair" in note for note in dataset.meta["notes"])


def test_a_column_of_lists_as_ids_is_an_error(tmp_path):
    pd.DataFrame({"user": [[1], [2]], "item": [1, 2]}).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(
        DataError, match=r"t\.parquet has the column user as .*; a user must be a number or text"
    ):
        read_pairs(tmp_path / "t.parquet")


def test_categories_and_numbers_are_valid_ids(tmp_path):
    table = pd.DataFrame({"user": pd.Categorical(["b", "a"]), "item": [7, 8], "rating": [1, 2]})
    table.to_parquet(tmp_path / "t.parquet")
    assert read_pairs(tmp_path / "t.parquet")["user"].tolist() == ["b", "a"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.csv", b"user,item,rating\n", "has no rows"),
        (
            "t.csv",
            b"who,item,rating\na,b,1\n",
            "no user column .*its columns are who, item, rating.*option user",
        ),
        ("t.csv", b"user,thing,rating\na,b,1\n", "no item column .*user, thing, rating.*option item"),
        (
            "t.csv",
            b"user,item,rating\na,b,good\n",
            "has 'good' in column rating, data row 1; it must be a finite number",
        ),
        (
            "t.csv",
            b"user,item,rating\na,b,1\na,b,inf\n",
            "has 'inf' in column rating, data row 2; it must be a finite number",
        ),
        ("t.csv", b"user,item,rating\n,b,1\n", "has no value in column user, data row 1; it must be an id"),
        ("t.parquet", b"user,item,rating\na,b,1\n", "not a readable Parquet file"),
        ("t.txt", b"user,item,rating\na,b,1\n", r"ends in '\.txt'"),
    ],
)
def test_an_unusable_table_is_an_error_that_names_the_file_and_the_reason(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} ?.*({reason})"):
        read_pairs(tmp_path / name)


def test_an_unknown_column_name_is_an_error_that_lists_the_columns(tmp_path):
    make_table().to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(DataError, match="no column who; its columns are user, item, rating"):
        read_pairs(tmp_path / "t.csv", {"user": "who"})


def test_building_needs_a_rating_column_and_enough_rows(tmp_path):
    make_table()[["user", "item"]].to_csv(tmp_path / "unrated.csv", index=False)
    with pytest.raises(DataError, match=r"no rating column .*user, item.*option rating"):
        prepare("ratings", source=tmp_path / "unrated.csv", cache=tmp_path / "c")
    make_table().head(2).to_csv(tmp_path / "short.csv", index=False)
    with pytest.raises(DataError, match="so that no split is empty"):
        prepare("ratings", source=tmp_path / "short.csv", cache=tmp_path / "c")
