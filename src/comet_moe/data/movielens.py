"""MovieLens-1M and -100K as two tasks: watched or not, and the rating (1..5) where watched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from comet_moe.data import recommender
from comet_moe.data.draft import Draft, Request
from comet_moe.data.errors import DataError, check_count, reading
from comet_moe.data.files import Need, read_parquet, require_range, require_rows
from comet_moe.data.movielens_authors import read_authors_parts
from comet_moe.data.movielens_subset import heavy_users_subset
from comet_moe.data.recommender import Table
from comet_moe.data.splits import movielens_sizes, stratified_split
from comet_moe.data.vocabulary import Vocabulary

ML1M_NEEDS = (
    Need("ratings", ("ratings.dat", "ratings.parquet")),
    Need("train", ("comet_split_train.parquet",), only_for_split="authors"),
    Need("validation", ("comet_split_val.parquet",), only_for_split="authors"),
    Need("test", ("comet_split_test.parquet",), only_for_split="authors"),
)
ML100K_NEEDS = (Need("ratings", ("u.data", "u_data.parquet")),)

_COLUMNS = ["user_id", "movie_id", "rating"]
_MAX_ID = 2**31 - 1
_ML1M_ROWS = 1_000_209
_ML100K_ROWS = 100_000
_NEGATIVES_NOTE = "unrated pairs are drawn as many as rated ones for each user, or as there are if fewer"
_AUTHORS_NOTE = (
    "validation and test rows, train users and rated train rows are the authors' own; "
    "the movies of the unrated train rows are not published and are drawn by the seed"
)


def build_1m(files: Mapping[str, Path], request: Request) -> Draft:
    """MovieLens-1M: 1,999,496 rows, half of them unrated pairs, split stratified by watched."""
    parts, users, items, notes = _parts_1m(files, request)
    return recommender.draft(parts, users, items, {"notes": notes})


def build_200k(files: Mapping[str, Path], request: Request) -> Draft:
    """The subset of MovieLens-1M behind the paper's Table 1: a part of the rows of the heaviest users."""
    parts, users, items, notes = _parts_1m(files, request)
    parts, kept = heavy_users_subset(parts, len(users), request)
    notes = [*notes, "the subset's users are numbered anew, its items as in the whole set"]
    return recommender.draft(parts, Vocabulary([users.ids[user] for user in kept]), items, {"notes": notes})


def build_100k(files: Mapping[str, Path], request: Request) -> Draft:
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
