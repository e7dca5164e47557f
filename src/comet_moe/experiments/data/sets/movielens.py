"""MovieLens-1M and -100K as two tasks: watched or not, and the rating (1..5) where watched.

MovieLens-1M is split at random, or by the paper's authors. They published all rows except the movies of the
unrated train rows, which are sampled here. Its 200k subset is that of the paper's Table 1.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.cache import RawDataset, Request
from comet_moe.experiments.data.raw_files import (
    RequiredFile,
    read_csv,
    require_official_count,
    require_range,
)
from comet_moe.experiments.data.sets.recommender import (
    RatingTable,
    add_unrated_pairs,
    make_rated_table,
    make_raw_dataset,
    sample_unseen_items,
    split_table,
)
from comet_moe.experiments.data.splits import Index, Sizes, stratified_split
from comet_moe.experiments.data.table.source import read_table
from comet_moe.experiments.data.vocabulary import Vocabulary

# The .dat and .data files are as published; the Parquet files have the same rows.
ML1M_FILES = (
    RequiredFile("ratings", ("ratings.dat", "ratings.parquet")),
    RequiredFile("train", ("comet_split_train.parquet",), only_for_split="authors"),
    RequiredFile("validation", ("comet_split_val.parquet",), only_for_split="authors"),
    RequiredFile("test", ("comet_split_test.parquet",), only_for_split="authors"),
)
ML100K_FILES = (RequiredFile("ratings", ("u.data", "u_data.parquet")),)

_ML1M_ROWS = 1_000_209
_ML100K_ROWS = 100_000
_AUTHORS_ROWS = {"train": 1_574_602, "validation": 224_944, "test": 199_950}
_MAX_ID = 2**31 - 1
_SUBSET_SHARE = 15  # one row in fifteen
_RANDOM_NOTE = "unrated pairs are sampled as many as rated ones per user, or as there are if fewer"
_AUTHORS_NOTE = (
    "validation and test rows, train users and rated train rows are the authors' own; "
    "the movies of the unrated train rows are not published and are sampled by the seed"
)

Tables = tuple[RatingTable, RatingTable, RatingTable]  # train, validation, test
Pairs = npt.NDArray[np.int64]  # user * num_items + item


def build_movielens_1m(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Build MovieLens-1M: 1,999,496 rows, half of them unrated pairs."""
    tables, users, items, notes = _make_1m_tables(files, request)
    return make_raw_dataset(tables, users, items, {"notes": notes})


def build_movielens_200k(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Build the subset of MovieLens-1M: some rows of the users with the most ratings."""
    tables, users, items, notes = _make_1m_tables(files, request)
    tables, kept = _take_heavy_users(tables, len(users), request)
    notes = [*notes, "the subset's users are numbered anew, its items as in the complete set"]
    return make_raw_dataset(tables, Vocabulary([users.ids[user] for user in kept]), items, {"notes": notes})


def build_movielens_100k(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Build MovieLens-100K in the way of MovieLens-1M; the paper does not use it."""
    # "196\t242\t3\t881250949"
    raw = _read_ratings(files["ratings"], "\t", [0, 1, 2, 3])
    require_official_count(files["ratings"], "ratings", len(raw), _ML100K_ROWS, request.strict)
    rated, users, items = _encode_ratings(files["ratings"], raw)
    notes = [
        _RANDOM_NOTE,
        "split in the proportions of MovieLens-1M (ours: the paper does not use this set)",
    ]
    return make_raw_dataset(_split_at_random(rated, users, items, request), users, items, {"notes": notes})


def _make_1m_tables(
    files: Mapping[str, Path], request: Request
) -> tuple[Tables, Vocabulary, Vocabulary, list[str]]:
    # "1::1193::5::978300760" with the separator ":" has empty columns: 20 times as fast as with "::".
    raw = _read_ratings(files["ratings"], ":", [0, 2, 4, 6])
    require_official_count(files["ratings"], "ratings", len(raw), _ML1M_ROWS, request.strict)
    rated, users, items = _encode_ratings(files["ratings"], raw)
    if request.split == "authors":
        return _read_authors_split(files, rated, users, items, request), users, items, [_AUTHORS_NOTE]
    return _split_at_random(rated, users, items, request), users, items, [_RANDOM_NOTE]


def _read_ratings(path: Path, separator: str, fields: list[int]) -> pd.DataFrame:
    columns = ["user_id", "movie_id", "rating"]
    if path.suffix == ".parquet":
        raw = read_table(path, columns)
    else:
        kind = "MovieLens ratings file"
        raw = read_csv(path, kind, sep=separator, header=None, usecols=fields, dtype=np.int64)
        # The timestamp is read to notice that the last line is truncated.
        raw.columns = pd.Index([*columns, "timestamp"])
    require_range(path, "user", raw["user_id"], 1, _MAX_ID)
    require_range(path, "movie", raw["movie_id"], 1, _MAX_ID)
    require_range(path, "rating", raw["rating"], 1, 5)
    return raw


def _encode_ratings(path: Path, raw: pd.DataFrame) -> tuple[RatingTable, Vocabulary, Vocabulary]:
    users, items = Vocabulary.build(raw["user_id"]), Vocabulary.build(raw["movie_id"])
    table = make_rated_table(
        users.encode(raw["user_id"]), items.encode(raw["movie_id"]), raw["rating"].to_numpy(np.float32)
    )
    is_repeated = pd.Series(_encode_pairs(table, len(items))).duplicated().to_numpy()
    if is_repeated.any():
        row = int(is_repeated.argmax())
        raise DataError(
            f"{path} rates movie {raw['movie_id'].iloc[row]} by user {raw['user_id'].iloc[row]} again in row "
            f"{row + 1}; each pair must be unique: download the file again."
        )
    return table, users, items


def _encode_pairs(table: RatingTable, num_items: int) -> Pairs:
    return table.user.astype(np.int64) * num_items + table.item


def movielens_sizes(rows: int) -> Sizes:
    """Return the sizes of the paper's MovieLens: test a tenth, then validation an eighth, both rounded up."""
    test = rows - 9 * rows // 10
    validation = -(-(rows - test) // 8)
    return rows - test - validation, validation, test


def _split_at_random(rated: RatingTable, users: Vocabulary, items: Vocabulary, request: Request) -> Tables:
    table = add_unrated_pairs(rated, len(users), len(items), request.make_rng("negatives"))
    rows = stratified_split(table.watched == 1, movielens_sizes(len(table)), request.make_rng("split"))
    return split_table(table, rows)


def _read_authors_split(
    files: Mapping[str, Path], rated: RatingTable, users: Vocabulary, items: Vocabulary, request: Request
) -> Tables:
    """Read the three split files and sample the movies that are missing (-1) in the train file.

    They are sampled without replacement from the rated movies that the user neither rated nor has as an
    unrated pair in validation or test.
    """
    rated_pairs = np.sort(_encode_pairs(rated, len(items)))
    train, validation, test = (
        _read_authors_file(files[split], split, rated_pairs, users, items, request.strict)
        for split in _AUTHORS_ROWS
    )
    missing_rows = np.flatnonzero(train.item < 0)
    held_out = [table.take(np.flatnonzero(table.watched == 0)) for table in (validation, test)]
    sampled = sample_unseen_items(
        np.concatenate([rated.user, *(table.user for table in held_out)]),
        np.concatenate([rated.item, *(table.item for table in held_out)]),
        np.bincount(train.user[missing_rows], minlength=len(users)),
        len(items),
        request.make_rng("authors train negatives"),
    )
    # The sample is grouped by user and sorted: assign it to the user's rows in random order.
    shuffled = request.make_rng("authors train order").permutation(missing_rows)
    train.item[shuffled[np.argsort(train.user[shuffled], kind="stable")]] = sampled
    return train, validation, test


def _read_authors_file(
    path: Path, split: str, rated_pairs: Pairs, users: Vocabulary, items: Vocabulary, strict: bool
) -> RatingTable:
    """Read one split and check it against ``rated_pairs``, sorted: these and no others are watched."""
    raw = read_table(path, ["user_id", "movie_id", "watched", "rating"])
    require_official_count(path, "rows", len(raw), _AUTHORS_ROWS[split], strict)
    require_range(path, "watched", raw["watched"], 0, 1)
    require_range(path, "rating", raw["rating"], 0, 5)
    watched = raw["watched"].to_numpy(np.uint8)
    table = RatingTable(
        users.encode(raw["user_id"].astype(np.int64) + 1),  # the authors count users and movies from zero
        items.encode(raw["movie_id"].astype(np.int64) + 1),
        watched,
        raw["rating"].to_numpy(np.float32),
    )
    is_missing = (split == "train") & (watched == 0) & (raw["movie_id"].to_numpy() == -1)
    is_known = (table.user >= 0) & ((table.item >= 0) | is_missing)
    is_rated = _is_in_sorted(_encode_pairs(table, len(items)), rated_pairs)
    wrong = ~is_known | (~is_missing & (is_rated != (watched == 1)))
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{path} disagrees with the ratings on user {raw['user_id'].iloc[row]} and movie "
            f"{raw['movie_id'].iloc[row]} (from zero) in data row {row + 1}; give files of one release."
        )
    return table


def _is_in_sorted(pairs: Pairs, ordered: Pairs) -> npt.NDArray[np.bool_]:
    position = np.searchsorted(ordered, pairs)
    return ordered[np.minimum(position, len(ordered) - 1)] == pairs


def _take_heavy_users(tables: Tables, num_users: int, request: Request) -> tuple[Tables, Index]:
    """Reduce the tables to users whose number of rated train rows is above the 75th percentile.

    One train row in fifteen is drawn among these users' rated rows, then as many unrated rows of the users
    drawn. Of validation and test one row in fifteen is drawn, of the same users. Users are numbered anew; the
    second value holds their old numbers in ascending order.
    """
    train = tables[0]
    ratings_per_user = np.bincount(train.user[train.watched == 1], minlength=num_users)
    is_heavy = ratings_per_user > np.quantile(ratings_per_user, 0.75)
    rng = request.make_rng("subset")
    size = len(train) // _SUBSET_SHARE
    rated_rows = _draw_rows(is_heavy[train.user] & (train.watched == 1), size, rng)
    kept: Index = np.unique(train.user[rated_rows]).astype(np.int64)
    if not len(kept) or min(map(len, tables)) < _SUBSET_SHARE:
        raise DataError(
            f"no user of {num_users} has more rated rows than the others, or {len(train)} train rows are too "
            f"few; use the complete set, movielens."
        )
    new_number = np.full(num_users, -1, dtype=np.int32)
    new_number[kept] = np.arange(len(kept), dtype=np.int32)
    unrated_rows = _draw_rows((new_number[train.user] >= 0) & (train.watched == 0), size, rng)
    rows = [rng.permutation(np.concatenate([rated_rows, unrated_rows]))]
    rows += [_draw_rows(new_number[t.user] >= 0, len(t) // _SUBSET_SHARE, rng) for t in tables[1:]]
    reduced = [table.take(index) for table, index in zip(tables, rows, strict=True)]
    first, second, third = (RatingTable(new_number[t.user], t.item, t.watched, t.rating) for t in reduced)
    return (first, second, third), kept


def _draw_rows(candidates: npt.NDArray[np.bool_], count: int, rng: np.random.Generator) -> Index:
    """Draw ``count`` of the flagged rows in random order, all of them if they are fewer."""
    return rng.permutation(np.flatnonzero(candidates))[:count]
