"""MovieLens-1M and -100K as two tasks: watched or not, and the rating (1..5) where watched.

MovieLens-1M is split at random, or by the paper's authors. They published all rows except the movies of the
unrated train rows, which are sampled here. Its 200k subset is that of the paper's Table 1.
"""

from collections.abc import Mapping, Sequence
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
from comet_moe.experiments.data.sets.ratings import (
    add_unrated_pairs,
    make_raw_dataset,
    make_table,
    sample_unseen_items,
    split_table,
)
from comet_moe.experiments.data.splits import Index, Sizes
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

Tables = Sequence[pd.DataFrame]  # train, validation, test
Pairs = npt.NDArray[np.int64]  # user * num_items + item


def build_movielens_1m(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Build MovieLens-1M: 1,999,496 rows, half of them unrated pairs."""
    tables, users, items, notes = _make_tables(files, request, _ML1M_ROWS)
    return make_raw_dataset(tables, users, items, {"notes": notes})


def build_movielens_200k(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Build the subset of MovieLens-1M: some rows of the users with the most ratings."""
    tables, users, items, notes = _make_tables(files, request, _ML1M_ROWS)
    tables, kept = _take_heavy_users(tables, len(users), request)
    notes = [*notes, "the subset's users are numbered anew, its items as in the complete set"]
    return make_raw_dataset(tables, Vocabulary([users.ids[user] for user in kept]), items, {"notes": notes})


def build_movielens_100k(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Build MovieLens-100K in the way of MovieLens-1M; the paper does not use it."""
    tables, users, items, notes = _make_tables(files, request, _ML100K_ROWS)
    notes = [*notes, "split in the proportions of MovieLens-1M (ours: the paper does not use this set)"]
    return make_raw_dataset(tables, users, items, {"notes": notes})


def _make_tables(
    files: Mapping[str, Path], request: Request, official: int
) -> tuple[Tables, Vocabulary, Vocabulary, list[str]]:
    path = files["ratings"]
    raw = _read_ratings(path)
    require_official_count(path, "ratings", len(raw), official, request.strict)
    users, items = Vocabulary.build(raw["user_id"]), Vocabulary.build(raw["movie_id"])
    user, item = users.encode(raw["user_id"]), items.encode(raw["movie_id"])
    rated = make_table(user, item, raw["rating"].to_numpy(np.float32))
    rated = rated.drop_duplicates(["user", "item"], keep="last")
    if request.split == "authors":
        return _read_authors_split(files, rated, users, items, request), users, items, [_AUTHORS_NOTE]
    table = add_unrated_pairs(rated, len(users), len(items), request.make_rng("negatives"))
    return split_table(table, movielens_sizes(len(table)), request), users, items, [_RANDOM_NOTE]


def _read_ratings(path: Path) -> pd.DataFrame:
    columns = ["user_id", "movie_id", "rating"]
    if path.suffix == ".parquet":
        raw = read_table(path, columns)
    else:
        # "1::1193::5::978300760" with the separator ":" has empty columns: 20 times as fast as with "::".
        separator, fields = (":", [0, 2, 4, 6]) if path.suffix == ".dat" else ("\t", [0, 1, 2, 3])
        kind = "MovieLens ratings file"
        raw = read_csv(path, kind, sep=separator, header=None, usecols=fields, dtype=np.int64)
        # The timestamp is read to notice that the last line is truncated.
        raw.columns = pd.Index([*columns, "timestamp"])
    require_range(path, "user", raw["user_id"], 1, _MAX_ID)
    require_range(path, "movie", raw["movie_id"], 1, _MAX_ID)
    require_range(path, "rating", raw["rating"], 1, 5)
    return raw


def movielens_sizes(rows: int) -> Sizes:
    """Return the sizes of the paper's MovieLens: test a tenth, then validation an eighth, both rounded up."""
    test = rows - 9 * rows // 10
    validation = -(-(rows - test) // 8)
    return rows - test - validation, validation, test


def _read_authors_split(
    files: Mapping[str, Path], rated: pd.DataFrame, users: Vocabulary, items: Vocabulary, request: Request
) -> Tables:
    """Read the three split files and sample the movies that are missing (-1) in the train file.

    They are sampled without replacement from the rated movies that the user neither rated nor has as an
    unrated pair in validation or test.
    """
    train, validation, test = (
        _read_authors_file(files[split], split, rated, users, items, request.strict)
        for split in _AUTHORS_ROWS
    )
    user, item = train["user"].to_numpy(), train["item"].to_numpy(copy=True)
    missing_rows = np.flatnonzero(item < 0)
    seen = pd.concat([rated, *(table[table["watched"] == 0] for table in (validation, test))])
    sampled = sample_unseen_items(
        seen["user"].to_numpy(),
        seen["item"].to_numpy(),
        np.bincount(user[missing_rows], minlength=len(users)),
        len(items),
        request.make_rng("authors train negatives"),
    )
    # The sample is grouped by user and sorted: assign it to the user's rows in random order.
    shuffled = request.make_rng("authors train order").permutation(missing_rows)
    item[shuffled[np.argsort(user[shuffled], kind="stable")]] = sampled
    return train.assign(item=item), validation, test


def _read_authors_file(
    path: Path, split: str, rated: pd.DataFrame, users: Vocabulary, items: Vocabulary, strict: bool
) -> pd.DataFrame:
    """Read one split and check it against ``rated``: these pairs and no others are watched."""
    raw = read_table(path, ["user_id", "movie_id", "watched", "rating"])
    require_official_count(path, "rows", len(raw), _AUTHORS_ROWS[split], strict)
    require_range(path, "watched", raw["watched"], 0, 1)
    require_range(path, "rating", raw["rating"], 0, 5)
    is_watched = raw["watched"].to_numpy() == 1
    user = users.encode(raw["user_id"].astype(np.int64) + 1)  # the authors count users and movies from zero
    item = items.encode(raw["movie_id"].astype(np.int64) + 1)
    table = make_table(user, item, raw["rating"].to_numpy(np.float32), is_watched)
    is_missing = (split == "train") & ~is_watched & (raw["movie_id"].to_numpy() == -1)
    is_known = (user >= 0) & ((item >= 0) | is_missing)
    is_rated = np.isin(_encode_pairs(table, len(items)), _encode_pairs(rated, len(items)))
    wrong = ~is_known | (~is_missing & (is_rated != is_watched))
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{path} disagrees with the ratings on user {raw['user_id'].iloc[row]} and movie "
            f"{raw['movie_id'].iloc[row]} (from zero) in data row {row + 1}; give files of one release."
        )
    return table


def _encode_pairs(table: pd.DataFrame, num_items: int) -> Pairs:
    return table["user"].to_numpy(np.int64) * num_items + table["item"].to_numpy()


def _take_heavy_users(tables: Tables, num_users: int, request: Request) -> tuple[Tables, Index]:
    """Reduce the tables to users whose number of rated train rows is above the 75th percentile.

    One train row in fifteen is drawn among these users' rated rows, then as many unrated rows of the users
    drawn. Of validation and test one row in fifteen is drawn, of the same users. Users are numbered anew; the
    second value holds their old numbers in ascending order.
    """
    owners = [table["user"].to_numpy() for table in tables]
    is_rated = tables[0]["watched"].to_numpy() == 1
    ratings_per_user = np.bincount(owners[0][is_rated], minlength=num_users)
    is_heavy = ratings_per_user > np.quantile(ratings_per_user, 0.75)
    rng = request.make_rng("subset")
    sizes = [len(table) // _SUBSET_SHARE for table in tables]
    rated_rows = _draw_rows(is_heavy[owners[0]] & is_rated, sizes[0], rng)
    kept: Index = np.unique(owners[0][rated_rows]).astype(np.int64)
    if not len(kept) or not min(sizes):
        raise DataError(
            f"no user of {num_users} has more rated rows than the others, or {len(is_rated)} train rows are "
            f"too few; use the complete set, movielens."
        )
    new_number = np.full(num_users, -1, dtype=np.int32)
    new_number[kept] = np.arange(len(kept), dtype=np.int32)
    users = [new_number[owner] for owner in owners]
    unrated_rows = _draw_rows((users[0] >= 0) & ~is_rated, sizes[0], rng)
    rows = [rng.permutation(np.concatenate([rated_rows, unrated_rows]))]
    rows += [_draw_rows(user >= 0, size, rng) for user, size in zip(users[1:], sizes[1:], strict=True)]
    renumbered = zip(tables, users, rows, strict=True)
    return [table.assign(user=user).iloc[index] for table, user, index in renumbered], kept


def _draw_rows(candidates: npt.NDArray[np.bool_], count: int, rng: np.random.Generator) -> Index:
    """Draw ``count`` of the flagged rows in random order, all of them if they are fewer."""
    return rng.permutation(np.flatnonzero(candidates))[:count]
