import numpy as np
import pandas as pd
import pytest
from raw_files import some_ratings, write_ml1m, write_ml100k

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import prepare
from comet_moe.experiments.data.sets.movielens import movielens_sizes
from comet_moe.experiments.data.sets.ratings import add_unrated_pairs, make_table
from comet_moe.experiments.data.splits import stratified_split

SPLITS = ("train", "validation", "test")


def all_rows(dataset):
    """All rows as (user, item, watched, rating), the splits one after the other."""
    parts = [getattr(dataset, name) for name in SPLITS]
    columns = [(group, name) for group in ("features", "targets") for name in getattr(parts[0], group)]
    return np.column_stack([np.concatenate([getattr(p, g)[n] for p in parts]) for g, n in columns])


@pytest.fixture(params=["movielens", "movielens-100k"])
def prepared(request, tmp_path):
    ratings = some_ratings()
    (write_ml1m if request.param == "movielens" else write_ml100k)(tmp_path, ratings)
    return ratings, prepare(request.param, source=tmp_path, cache=tmp_path / "cache", strict=False)


def test_every_rating_is_a_row_and_each_user_has_as_many_unrated_pairs_if_possible(prepared):
    ratings, dataset = prepared
    users, items = dataset.vocabulary("user"), dataset.vocabulary("item")
    table = all_rows(dataset)
    watched = table[table[:, 2] == 1]
    expected = np.column_stack(
        [users.encode(ratings["user_id"]), items.encode(ratings["movie_id"]), ratings["rating"]]
    )
    assert np.array_equal(np.unique(watched[:, [0, 1, 3]], axis=0), np.unique(expected, axis=0))
    unwatched = table[table[:, 2] == 0]
    assert not (unwatched[:, 3] != 0).any()
    pairs = {tuple(pair) for pair in table[:, :2].tolist()}
    assert len(pairs) == len(table)  # no unrated pair is rated, or repeated
    per_user = np.bincount(expected[:, 0])
    drawn = np.bincount(unwatched[:, 0].astype(int), minlength=len(per_user))
    assert np.array_equal(drawn, np.minimum(per_user, len(items) - per_user))


def test_ids_are_contiguous_and_arrays_are_typed_and_read_only(prepared):
    ratings, dataset = prepared
    assert dataset.meta["num_users"] == ratings["user_id"].nunique()
    assert dataset.meta["num_items"] == ratings["movie_id"].nunique()
    table = all_rows(dataset)
    assert set(table[:, 0]) == set(range(dataset.meta["num_users"]))
    assert table[:, 1].max() == dataset.meta["num_items"] - 1
    assert dataset.train.features["user"].dtype == np.int32
    assert dataset.train.targets["watched"].dtype == np.uint8
    assert dataset.train.targets["rating"].dtype == np.float32
    assert not dataset.train.features["user"].flags.writeable


def test_splits_have_the_papers_proportions_and_are_stratified(prepared):
    _, dataset = prepared
    parts = [getattr(dataset, name) for name in SPLITS]
    sizes = [len(part) for part in parts]
    assert tuple(sizes) == movielens_sizes(sum(sizes))
    share = sum(part.targets["watched"].sum() for part in parts) / sum(sizes)
    for part in parts:
        assert abs(part.targets["watched"].sum() - share * len(part)) < 1


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    write_ml1m(tmp_path, some_ratings())

    def arrays(cache, seed):
        folder = prepare("movielens", source=tmp_path, cache=tmp_path / cache, seed=seed, strict=False).folder
        return {path.name: path.read_bytes() for path in folder.glob("*.npy")}

    assert arrays("a", 0) == arrays("b", 0)
    assert arrays("a", 0)["train.features.item.npy"] != arrays("a", 1)["train.features.item.npy"]


def test_parquet_and_dat_files_give_the_same_data(tmp_path):
    ratings = some_ratings()
    for name in ("dat", "parquet"):
        (tmp_path / name).mkdir()
    write_ml1m(tmp_path / "dat", ratings)
    ratings.to_parquet(tmp_path / "parquet" / "ratings.parquet")
    first, second = (
        prepare("movielens", source=tmp_path / n, cache=tmp_path / f"c-{n}", strict=False)
        for n in ("dat", "parquet")
    )
    assert np.array_equal(all_rows(first), all_rows(second))


def write_authors_split(folder, ratings):
    """Write a split like the authors': ids from zero, movie -1 for the unrated train rows."""
    write_ml1m(folder, ratings)
    user, movies = ratings["user_id"].to_numpy(np.int32), np.unique(ratings["movie_id"])
    users = np.unique(user)
    item = np.searchsorted(movies, ratings["movie_id"]).astype(np.int32)
    positives = make_table(
        np.searchsorted(users, user).astype(np.int32), item, ratings["rating"].to_numpy(np.float32)
    )
    table = add_unrated_pairs(positives, len(users), len(movies), np.random.default_rng(5))
    parts = stratified_split(
        table["watched"].to_numpy() == 1, movielens_sizes(len(table)), np.random.default_rng(6)
    )
    frames = []
    for name, index in zip(("train", "val", "test"), parts, strict=True):
        part = table.iloc[index]
        movie = movies[part["item"]] - 1
        if name == "train":
            movie = np.where(part.watched == 1, movie, -1)
        frame = pd.DataFrame(
            {
                "user_id": users[part.user] - 1,
                "movie_id": movie,
                "watched": part.watched,
                "rating": part.rating,
            }
        )
        frame.astype("int16").to_parquet(folder / f"comet_split_{name}.parquet")
        frames.append(frame)
    return frames


def test_the_authors_split_keeps_their_rows_and_samples_only_the_missing_movies(tmp_path):
    ratings = some_ratings()
    frames = write_authors_split(tmp_path, ratings)
    dataset = prepare("movielens", source=tmp_path, cache=tmp_path / "c", split="authors", strict=False)
    users, items = dataset.vocabulary("user"), dataset.vocabulary("item")
    for name, frame in zip(SPLITS, frames, strict=True):
        part = getattr(dataset, name)
        assert np.array_equal(part.features["user"], users.encode(frame["user_id"] + 1))
        known = frame["movie_id"].to_numpy() >= 0
        assert np.array_equal(part.features["item"][known], items.encode(frame["movie_id"] + 1)[known])
        assert np.array_equal(part.targets["watched"], frame["watched"])
        assert np.array_equal(part.targets["rating"], frame["rating"])
    table = all_rows(dataset)
    assert len(np.unique(table[:, :2], axis=0)) == len(table)
    assert table[:, 1].min() >= 0


def test_an_authors_split_that_contradicts_the_ratings_is_an_error(tmp_path):
    frames = write_authors_split(tmp_path, some_ratings())
    wrong = frames[1].astype("int16")
    wrong["watched"] = 1 - wrong["watched"]
    wrong.to_parquet(tmp_path / "comet_split_val.parquet")
    with pytest.raises(DataError, match=r"comet_split_val\.parquet disagrees with the ratings on user"):
        prepare("movielens", source=tmp_path, cache=tmp_path / "c", split="authors", strict=False)


def test_the_subset_has_a_fifteenth_of_each_split_from_users_with_many_ratings(tmp_path):
    write_ml1m(tmp_path, some_ratings(users=80, items=60, top=0.5))
    complete = prepare("movielens", source=tmp_path, cache=tmp_path / "c", strict=False)
    small = prepare("movielens-200k", source=tmp_path, cache=tmp_path / "c", strict=False)
    assert len(small.train) == 2 * (len(complete.train) // 15)
    assert small.train.targets["watched"].sum() == len(complete.train) // 15
    assert len(small.validation) == len(complete.validation) // 15
    assert len(small.test) == len(complete.test) // 15
    counts = np.bincount(complete.train.features["user"][complete.train.targets["watched"] == 1])
    heavy = {
        complete.vocabulary("user").ids[user] for user in np.flatnonzero(counts > np.quantile(counts, 0.75))
    }
    assert set(small.vocabulary("user").ids) <= heavy
    assert small.meta["num_users"] == len(small.vocabulary("user")) == small.train.features["user"].max() + 1


def test_too_few_rows_for_the_subset_are_an_error(tmp_path):
    write_ml1m(tmp_path, some_ratings(users=10, items=10))
    with pytest.raises(DataError, match="too few; use the complete set, movielens"):
        prepare("movielens-200k", source=tmp_path, cache=tmp_path / "c", strict=False)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty"),
        ("1::2::3", "not a readable MovieLens ratings file"),
        ("1::2::x::4\n", "not a readable MovieLens ratings file"),
        ("1::2::3::4\n1::3", "not a readable MovieLens ratings file"),
        ("1::2::6::4\n", r"has 6 as rating in data row 1; it must be in 1\.\.5"),
        ("0::2::5::4\n", "has 0 as user in data row 1"),
        ("\0\1\2 binary", "not a readable MovieLens ratings file"),
    ],
)
def test_damaged_ratings_are_an_error_that_names_the_file(tmp_path, content, reason):
    (tmp_path / "ratings.dat").write_text(content)
    with pytest.raises(DataError, match=rf"ratings\.dat.*{reason}"):
        prepare("movielens", source=tmp_path, cache=tmp_path / "c", strict=False)


def test_an_unofficial_number_of_rows_is_an_error_unless_any_size_is_accepted(tmp_path):
    ratings = some_ratings()
    write_ml1m(tmp_path, ratings)
    with pytest.raises(
        DataError, match=rf"ratings\.dat has {len(ratings):,} ratings .* 1,000,209.*--any-size"
    ):
        prepare("movielens", source=tmp_path, cache=tmp_path / "c")


def test_a_truncated_parquet_file_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "ratings.parquet"
    some_ratings().to_parquet(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"ratings\.parquet is not a readable Parquet file"):
        prepare("movielens", source=tmp_path, cache=tmp_path / "c", strict=False)


def test_ratings_that_are_text_are_an_error(tmp_path):
    some_ratings().astype({"rating": str}).to_parquet(tmp_path / "ratings.parquet")
    with pytest.raises(DataError, match=r"has the column rating as .*; it must hold numbers"):
        prepare("movielens", source=tmp_path, cache=tmp_path / "c", strict=False)


def test_a_parquet_file_without_its_columns_is_an_error_that_lists_them(tmp_path):
    some_ratings().rename(columns={"movie_id": "film"}).to_parquet(tmp_path / "ratings.parquet")
    with pytest.raises(DataError, match="no column movie_id; its columns are user_id, film, rating"):
        prepare("movielens", source=tmp_path, cache=tmp_path / "c", strict=False)
