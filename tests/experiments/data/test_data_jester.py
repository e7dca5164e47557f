import zipfile

import numpy as np
import pytest
from raw_files import some_jokes, write_jester

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import prepare


def restore_matrix(dataset):
    """Put the rows of all splits back into users x jokes: (watched, rating)."""
    shape = dataset.meta["num_users"], dataset.meta["num_items"]
    watched, rating = np.full(shape, 9, np.uint8), np.zeros(shape, np.float32)
    for part in (dataset.train, dataset.validation, dataset.test):
        pairs = part.features["user"], part.features["item"]
        assert (watched[pairs] == 9).all()
        watched[pairs], rating[pairs] = part.targets["watched"], part.targets["rating"]
    return watched, rating


def test_every_pair_is_a_row_and_ratings_are_standardised_by_the_train_ratings(tmp_path):
    first, second = some_jokes(30), some_jokes(20, seed=1)
    write_jester(tmp_path / "jester-data-1.csv", first)
    write_jester(tmp_path / "jester-data-2.csv", second)
    dataset = prepare("jester", source=tmp_path, cache=tmp_path / "c", strict=False)
    raw = np.concatenate([first, second])
    watched, rating = restore_matrix(dataset)
    assert np.array_equal(watched == 1, raw != 99)
    mean, deviation = dataset.meta["rating_mean"], dataset.meta["rating_std"]
    assert np.abs(rating * deviation + mean - raw)[raw != 99].max() < 1e-4  # float32 at magnitude 10
    assert not rating[raw == 99].any()
    known = dataset.train.targets["rating"][dataset.train.targets["watched"] == 1]
    assert abs(known.mean()) < 1e-5
    assert abs(known.std() - 1) < 1e-5
    sizes = [len(part) for part in (dataset.train, dataset.validation, dataset.test)]
    assert sizes == [420, 90, 90]


def test_csv_zip_and_npz_files_give_the_same_data(tmp_path):
    ratings = some_jokes()
    for name in ("csv", "zip", "npz"):
        (tmp_path / name).mkdir()
    table = write_jester(tmp_path / "csv" / "jester-data-1.csv", ratings)
    with zipfile.ZipFile(tmp_path / "zip" / "jester_dataset_1_1.zip", "w") as archive:
        archive.write(table, "jester-data-1.csv")
    x100 = np.where(ratings == 99, 9900, np.round(ratings * 100)).astype(np.int16)
    np.savez_compressed(tmp_path / "npz" / "jester_data_1.npz", ratings_x100=x100)
    matrices = [
        restore_matrix(prepare("jester", source=tmp_path / n, cache=tmp_path / f"c-{n}", strict=False))
        for n in ("csv", "zip", "npz")
    ]
    for watched, rating in matrices[1:]:
        assert np.array_equal(watched, matrices[0][0])
        assert np.allclose(rating, matrices[0][1], atol=1e-5)


def test_an_excel_table_is_an_error_that_says_to_save_it_as_csv(tmp_path):
    (tmp_path / "jester-data-1.xls").write_bytes(b"\xd0\xcf\x11\xe0")
    with pytest.raises(
        DataError, match=r"jester-data-1\.xls is an Excel table.*save it as jester-data-1\.csv"
    ):
        prepare("jester", source=tmp_path, cache=tmp_path / "c")


def test_a_rating_out_of_range_is_an_error_that_names_joke_and_row(tmp_path):
    ratings = some_jokes()
    ratings[3, 4] = 12.5
    write_jester(tmp_path / "jester-data-1.csv", ratings)
    with pytest.raises(DataError, match=r"jester-data-1\.csv has 12\.5 as the rating of joke 5 in row 4"):
        prepare("jester", source=tmp_path, cache=tmp_path / "c", strict=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("jester-data-1.csv", b""),
        ("jester-data-1.csv", b"2,1.5,x\n"),
        ("jester-data-1.csv", b"2,1.5,99\n1,2"),
        ("jester-data-1.zip", b"PK not a zip"),
        ("jester_data_1.npz", b"PK not a zip"),
    ],
)
def test_a_damaged_part_is_an_error_that_names_it(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        prepare("jester", source=tmp_path, cache=tmp_path / "c", strict=False)


def test_an_unofficial_number_of_users_is_an_error(tmp_path):
    write_jester(tmp_path / "jester-data-1.csv", some_jokes(30))
    with pytest.raises(DataError, match=r"30 users where the official release has 24,983.*--any-size"):
        prepare("jester", source=tmp_path, cache=tmp_path / "c")
