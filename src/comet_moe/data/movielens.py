"""MovieLens-1M and -100K as two tasks: watched or not, and the rating (1..5) where watched.

The authors' own split of MovieLens-1M: every row but the movies of the unrated train rows is theirs.

The 200k subset of MovieLens that the paper's Table 1 is about.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

import comet_moe.data.recommender as recommender
from comet_moe.data.io import RequiredFile, check_count, read_parquet, reading, require_range, require_rows
from comet_moe.data.recommender import Table, draw_unseen
from comet_moe.data.splits import Index, movielens_sizes, stratified_split
from comet_moe.data.types import RawDataset, Request
from comet_moe.data.vocabulary import Vocabulary
from comet_moe.exceptions import DataError

ML1M_NEEDS = (
    RequiredFile("ratings", ("ratings.dat", "ratings.parquet")),
    RequiredFile("train", ("comet_split_train.parquet",), only_for_split="authors"),
    RequiredFile("validation", ("comet_split_val.parquet",), only_for_split="authors"),
    RequiredFile("test", ("comet_split_test.parquet",), only_for_split="authors"),
)
ML100K_NEEDS = (RequiredFile("ratings", ("u.data", "u_data.parquet")),)

_COLUMNS = ["user_id", "movie_id", "rating"]
_MAX_ID = 2**31 - 1
_ML1M_ROWS = 1_000_209
_ML100K_ROWS = 100_000
_NEGATIVES_NOTE = "unrated pairs are drawn as many as rated ones for each user, or as there are if fewer"
_AUTHORS_NOTE = (
    "validation and test rows, train users and rated train rows are the authors' own; "
    "the movies of the unrated train rows are not published and are drawn by the seed"
)


def build_1m(files: Mapping[str, Path], request: Request) -> RawDataset:
    """MovieLens-1M: 1,999,496 rows, half of them unrated pairs, split stratified by watched."""
    parts, users, items, notes = _parts_1m(files, request)
    return recommender.draft(parts, users, items, {"notes": notes})


def build_200k(files: Mapping[str, Path], request: Request) -> RawDataset:
    """The subset of MovieLens-1M behind the paper's Table 1: a part of the rows of the heaviest users."""
    parts, users, items, notes = _parts_1m(files, request)
    parts, kept = heavy_users_subset(parts, len(users), request)
    notes = [*notes, "the subset's users are numbered anew, its items as in the whole set"]
    return recommender.draft(parts, Vocabulary([users.ids[user] for user in kept]), items, {"notes": notes})


def build_100k(files: Mapping[str, Path], request: Request) -> RawDataset:
    """MovieLens-100K: made and split like MovieLens-1M; the paper does not use it."""
    raw = _read(files["ratings"], "\t", [0, 1, 2, 3])
    check_count(files["ratings"], "ratings", len(raw), _ML100K_ROWS, request.strict)
    positives, users, items = _number(files["ratings"], raw)
    notes = [
        _NEGATIVES_NOTE,
        "split in the proportions of MovieLens-1M (ours: the paper does not use this set)",
    ]
    return recommender.draft(_random_parts(positives, users, items, request), users, items, {"notes": notes})


def _parts_1m(
    files: Mapping[str, Path], request: Request
) -> tuple[tuple[Table, Table, Table], Vocabulary, Vocabulary, list[str]]:
    # "1::1193::5::978300760" read with the separator ":" has empty columns between: 20 times as fast.
    raw = _read(files["ratings"], ":", [0, 2, 4, 6])
    check_count(files["ratings"], "ratings", len(raw), _ML1M_ROWS, request.strict)
    positives, users, items = _number(files["ratings"], raw)
    if request.split == "authors":
        parts = read_authors_parts(files, positives, users, items, request)
        return parts, users, items, [_AUTHORS_NOTE]
    return _random_parts(positives, users, items, request), users, items, [_NEGATIVES_NOTE]


def _read(path: Path, separator: str, fields: list[int]) -> pd.DataFrame:
    if path.suffix == ".parquet":
        raw = read_parquet(path, _COLUMNS)
    else:
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty; fetch it again.")
        with reading(path, "MovieLens ratings file"):
            raw = pd.read_csv(path, sep=separator, header=None, usecols=fields, dtype=np.int64)
            # The timestamp is read to notice a last line that is cut off.
            raw.columns = pd.Index([*_COLUMNS, "timestamp"])
    require_rows(path, len(raw))
    require_range(path, "user", raw["user_id"], 1, _MAX_ID)
    require_range(path, "movie", raw["movie_id"], 1, _MAX_ID)
    require_range(path, "rating", raw["rating"], 1, 5)
    return raw


def _number(path: Path, raw: pd.DataFrame) -> tuple[Table, Vocabulary, Vocabulary]:
    users, items = Vocabulary.build(raw["user_id"]), Vocabulary.build(raw["movie_id"])
    user, item = users.encode(raw["user_id"]), items.encode(raw["movie_id"])
    pair = user.astype(np.int64) * len(items) + item
    repeated = pd.Series(pair).duplicated().to_numpy()
    if repeated.any():
        row = int(repeated.argmax())
        raise DataError(
            f"{path} rates movie {raw['movie_id'].iloc[row]} by user {raw['user_id'].iloc[row]} again in row "
            f"{row + 1}; each pair may be there once: fetch the file again."
        )
    return recommender.rated(user, item, raw["rating"].to_numpy(np.float32)), users, items


def _random_parts(
    positives: Table, users: Vocabulary, items: Vocabulary, request: Request
) -> tuple[Table, Table, Table]:
    table = recommender.with_unrated(positives, len(users), len(items), request.stream("negatives"))
    parts = stratified_split(table.watched == 1, movielens_sizes(len(table)), request.stream("split"))
    return recommender.take_parts(table, parts)


Pairs = npt.NDArray[np.int64]  # user * items + item
_ROWS = {"train": 1_574_602, "validation": 224_944, "test": 199_950}


def read_authors_parts(
    files: Mapping[str, Path], positives: Table, users: Vocabulary, items: Vocabulary, request: Request
) -> tuple[Table, Table, Table]:
    """Read the three split files and draw the movies that the train file leaves open (-1).

    They are drawn without replacement from the rated movies that the user neither rated nor has as an unrated
    pair in validation or test.
    """
    rated_pairs = np.sort(_pairs(positives, len(items)))
    train, validation, test = (
        _read_part(files[part], part, rated_pairs, users, items, request.strict) for part in _ROWS
    )
    open_rows = np.flatnonzero(train.item < 0)
    held_out = [part.take(np.flatnonzero(part.watched == 0)) for part in (validation, test)]
    drawn = draw_unseen(
        np.concatenate([positives.user, *(part.user for part in held_out)]),
        np.concatenate([positives.item, *(part.item for part in held_out)]),
        np.bincount(train.user[open_rows], minlength=len(users)),
        len(items),
        request.stream("authors train negatives"),
    )
    # The draw is grouped by user and sorted: hand it to the user's rows in random order.
    shuffled = request.stream("authors train order").permutation(open_rows)
    train.item[shuffled[np.argsort(train.user[shuffled], kind="stable")]] = drawn
    return train, validation, test


def _read_part(
    path: Path,
    part: str,
    rated_pairs: Pairs,
    users: Vocabulary,
    items: Vocabulary,
    strict: bool,
) -> Table:
    raw = read_parquet(path, ["user_id", "movie_id", "watched", "rating"])
    check_count(path, "rows", len(raw), _ROWS[part], strict)
    require_range(path, "watched", raw["watched"], 0, 1)
    require_range(path, "rating", raw["rating"], 0, 5)
    # The authors count users and movies from zero.
    user, item = (
        users.encode(raw["user_id"].astype(np.int64) + 1),
        items.encode(raw["movie_id"].astype(np.int64) + 1),
    )
    watched = raw["watched"].to_numpy(np.uint8)
    may_be_open = (
        (watched == 0) & (raw["movie_id"].to_numpy() == -1) if part == "train" else np.zeros(len(raw), bool)
    )
    unknown = (user < 0) | ((item < 0) & ~may_be_open)
    table = Table(user, item, watched, raw["rating"].to_numpy(np.float32))
    wrong = unknown | (~may_be_open & (_contained(_pairs(table, len(items)), rated_pairs) != (watched == 1)))
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{path} disagrees with the ratings on user {raw['user_id'].iloc[row]} and movie "
            f"{raw['movie_id'].iloc[row]} (from zero) in data row {row + 1}; give files of one release."
        )
    return table


def _contained(pairs: Pairs, ordered: Pairs) -> npt.NDArray[np.bool_]:
    place = np.searchsorted(ordered, pairs)
    return ordered[np.minimum(place, len(ordered) - 1)] == pairs


def _pairs(table: Table, num_items: int) -> Pairs:
    return table.user.astype(np.int64) * num_items + table.item


_SHARE = 15  # each part keeps one row in fifteen (twice that in train: as many rated as unrated rows)


def heavy_users_subset(
    parts: tuple[Table, Table, Table], num_users: int, request: Request
) -> tuple[tuple[Table, Table, Table], Index]:
    """Cut the parts down to users whose number of rated train rows is above the 75th percentile.

    Of these users' rated train rows as many as a fifteenth of all train rows are drawn, then as many unrated
    ones of the users so drawn; of validation and test one row in fifteen, of those users. Users are numbered
    anew; the second value holds their old numbers in ascending order.
    """
    train = parts[0]
    per_user = np.bincount(train.user[train.watched == 1], minlength=num_users)
    heavy = per_user > np.quantile(per_user, 0.75)
    rng = request.stream("subset")
    quota = len(train) // _SHARE
    rated_rows = _draw(heavy[train.user] & (train.watched == 1), quota, rng)
    kept: Index = np.unique(train.user[rated_rows]).astype(np.int64)
    if not len(kept) or min(map(len, parts)) < _SHARE:
        raise DataError(
            f"no user of {num_users} stands out by the number of rated rows or {len(train)} train rows are "
            f"too few; use the whole set, movielens."
        )
    new_number = np.full(num_users, -1, dtype=np.int32)
    new_number[kept] = np.arange(len(kept), dtype=np.int32)
    unrated_rows = _draw((new_number[train.user] >= 0) & (train.watched == 0), quota, rng)
    train_rows = rng.permutation(np.concatenate([rated_rows, unrated_rows]))
    rows = [train_rows] + [_draw(new_number[p.user] >= 0, len(p) // _SHARE, rng) for p in parts[1:]]
    small = [part.take(index) for part, index in zip(parts, rows, strict=True)]
    first, second, third = (Table(new_number[p.user], p.item, p.watched, p.rating) for p in small)
    return (first, second, third), kept


def _draw(candidates: npt.NDArray[np.bool_], count: int, rng: np.random.Generator) -> Index:
    """Draw ``count`` of the flagged rows in random order, all of them if they are fewer."""
    return rng.permutation(np.flatnonzero(candidates))[:count]
