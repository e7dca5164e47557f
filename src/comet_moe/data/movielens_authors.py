"""The authors' own split of MovieLens-1M: every row but the movies of the unrated train rows is theirs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from comet_moe.data.draft import Request
from comet_moe.data.errors import DataError, check_count
from comet_moe.data.files import read_parquet, require_range
from comet_moe.data.pairs import draw_unseen
from comet_moe.data.recommender import Table
from comet_moe.data.vocabulary import Vocabulary

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
        _read(files[part], part, rated_pairs, users, items, request.strict) for part in _ROWS
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


def _read(
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
