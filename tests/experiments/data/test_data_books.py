import numpy as np
import pandas as pd
import pytest
from raw_files import BOOKS_HEADER, write_books

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import prepare


def complete_records(users=8, books=9):
    """Every user has a record of every book: none is dropped."""
    return [
        (10 + user, f"03454510{book:02d}", (user * book) % 11)
        for user in range(users)
        for book in range(books)
    ]


def test_users_and_books_with_few_records_are_dropped_until_none_remains(tmp_path):
    # Only with the rare book does user 99 have five records: without it the user is dropped too.
    few = [(99, f"03454510{book:02d}", 5) for book in range(4)] + [(99, "RARE", 7)]
    write_books(tmp_path, complete_records() + few)
    dataset = prepare("books", source=tmp_path, cache=tmp_path / "c", strict=False)
    assert dataset.meta["num_users"] == 8
    assert dataset.meta["num_items"] == 9
    assert "99" not in dataset.vocabulary("user").ids
    assert "RARE" not in dataset.vocabulary("item").ids
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [50, 11, 11]


def test_implicit_ratings_are_not_watched_and_explicit_ones_keep_their_value(tmp_path):
    write_books(tmp_path, complete_records())
    dataset = prepare("books", source=tmp_path, cache=tmp_path / "c", strict=False)
    users, items = dataset.vocabulary("user"), dataset.vocabulary("item")
    records = set()
    for part in (dataset.train, dataset.validation, dataset.test):
        columns = part.features["user"], part.features["item"], part.targets["rating"]
        for user, item, rating in zip(*columns, strict=True):
            records.add((int(users.ids[user]), items.ids[item], int(rating)))
        assert np.array_equal(part.targets["watched"], part.targets["rating"] > 0)
    assert records == set(complete_records())


def test_latin_1_letters_and_escaped_quotes_are_read_as_published(tmp_path):
    odd = {'\\"0432534220\\"': '"0432534220"', "ISBN-\xe9;1": "ISBN-\xe9;1", "back\\\\slash": "back\\slash"}
    rows = complete_records() + [(10 + user, raw, 3) for raw in odd for user in range(8)]
    write_books(tmp_path, rows)
    dataset = prepare("books", source=tmp_path, cache=tmp_path / "c", strict=False)
    assert set(odd.values()) <= set(dataset.vocabulary("item").ids)


def test_a_parquet_file_of_the_records_gives_the_same_data(tmp_path):
    for name in ("csv", "parquet"):
        (tmp_path / name).mkdir()
    write_books(tmp_path / "csv", complete_records())
    frame = pd.DataFrame(complete_records(), columns=["user_id", "isbn", "rating"])
    frame.to_parquet(tmp_path / "parquet" / "ratings_subset.parquet")
    first, second = (
        prepare("books", source=tmp_path / n, cache=tmp_path / f"c-{n}", strict=False)
        for n in ("csv", "parquet")
    )
    assert np.array_equal(first.train.features["item"], second.train.features["item"])
    assert np.array_equal(first.test.targets["rating"], second.test.targets["rating"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        (BOOKS_HEADER + "\n", "has no rows"),
        (
            '"User";"ISBN"\n"1";"2"\n',
            r"no column User-ID, Book-Rating; did you mean User\? Its columns are User",
        ),
        (BOOKS_HEADER + '\n"1";"2";"11"\n', "has 11 as rating in data row 1"),
        (BOOKS_HEADER + '\n"1";"2";"5"\n"1";"";"5"\n', "lacks a user or an ISBN in data row 2"),
        (BOOKS_HEADER + '\n"1";" ";"5"\n', "lacks a user or an ISBN in data row 1"),
        (BOOKS_HEADER + '\n"1";"2";"x"\n', "not a readable Book-Crossing table"),
        (BOOKS_HEADER + '\n"1";"2"\n', "not a readable Book-Crossing table"),
        (BOOKS_HEADER + '\n"1";"2";"5"\n', "no users and books with at least 5 records"),
    ],
)
def test_a_damaged_table_is_an_error_that_names_it(tmp_path, text, reason):
    (tmp_path / "BX-Book-Ratings.csv").write_text(text)
    with pytest.raises(DataError, match=rf"BX-Book-Ratings\.csv.*{reason}"):
        prepare("books", source=tmp_path, cache=tmp_path / "c", strict=False)


def test_an_unofficial_number_of_records_is_an_error(tmp_path):
    write_books(tmp_path, complete_records())
    with pytest.raises(DataError, match=r"72 records where the official release has 1,149,780.*--any-size"):
        prepare("books", source=tmp_path, cache=tmp_path / "c")
