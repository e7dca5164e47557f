"""The 200k subset of MovieLens that the paper's Table 1 is about."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from comet_moe.data.draft import Request
from comet_moe.data.errors import DataError
from comet_moe.data.recommender import Table
from comet_moe.data.splits import Index

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
