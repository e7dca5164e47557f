"""Pairs of a user and an item that do not occur in a table, drawn without replacement.

All users are drawn for at once. A user's unseen items are numbered 0..U-1 (their ranks); distinct ranks are
drawn by repeated drawing and dropping of repeats, then turned into items. Where more than half of the unseen
items are wanted, those left out are drawn instead, so each round about halves what is missing. Time and
memory grow with the number of pairs, never with users x items.

The two-task table of the recommender sets: will this user take this item, and how is it rated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from comet_moe.data.splits import Index
from comet_moe.data.types import RawDataset, RawSplit
from comet_moe.data.vocabulary import Vocabulary
from comet_moe.exceptions import DataError

Ints = npt.NDArray[np.int64]


def balanced_counts(user: npt.NDArray[np.int32], num_users: int, num_items: int) -> Ints:
    """For each user with n seen items: min(n, num_items - n), as many unseen ones as there are seen ones."""
    seen = np.bincount(user, minlength=num_users)
    return np.minimum(seen, num_items - seen)


def draw_unseen(
    user: npt.NDArray[np.int32],
    item: npt.NDArray[np.int32],
    counts: Ints,
    num_items: int,
    rng: np.random.Generator,
) -> npt.NDArray[np.int32]:
    """Draw counts[u] items that user u has not seen, uniformly without replacement.

    user, item (N,): the seen pairs, each once. Returns items (sum of counts,), grouped by ascending user.
    """
    pool = num_items - np.bincount(user, minlength=len(counts))
    if (counts > pool).any():
        worst = int(np.argmax(counts - pool))
        raise DataError(
            f"user number {worst} needs {counts[worst]} unseen items but has {pool[worst]}: ask for fewer."
        )
    few = 2 * counts <= pool
    ranks = _draw_distinct(np.where(few, counts, pool - counts), pool, num_items, rng)
    owner = ranks // num_items
    kept = ranks[few[owner]]
    inverted = _all_ranks(np.where(few, 0, pool), num_items)
    inverted = np.setdiff1d(inverted, ranks[~few[owner]], assume_unique=True)
    return _items_of_ranks(np.sort(np.concatenate([kept, inverted])), user, item, num_items)


def _draw_distinct(counts: Ints, pool: Ints, base: int, rng: np.random.Generator) -> Ints:
    """Sorted codes user * base + rank, counts[u] distinct ranks below pool[u] for each user."""
    drawn: Ints = np.empty(0, dtype=np.int64)
    missing = counts
    while missing.any():
        owner = np.repeat(np.arange(len(counts)), missing)
        drawn = _distinct(np.concatenate([drawn, owner * base + rng.integers(0, pool[owner])]))
        missing = counts - np.bincount(drawn // base, minlength=len(counts))
    return drawn


def _distinct(codes: Ints) -> Ints:
    """Sort and drop repeats; np.unique hashes, which takes 50 times as long on these codes."""
    codes = np.sort(codes)
    return codes[np.append(True, codes[1:] != codes[:-1])]


def _all_ranks(counts: Ints, base: int) -> Ints:
    """Sorted codes of the ranks 0..counts[u]-1 of each user."""
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return owner * base + np.arange(len(owner)) - first[owner]


def _items_of_ranks(
    codes: Ints, user: npt.NDArray[np.int32], item: npt.NDArray[np.int32], num_items: int
) -> npt.NDArray[np.int32]:
    """The unseen item of rank q is q + the number of seen items i (the j-th of the user) with i - j <= q."""
    seen = np.sort(user.astype(np.int64) * num_items + item)
    seen_user = seen // num_items
    first = np.searchsorted(seen, seen_user * num_items)
    unseen_below = seen - (np.arange(len(seen)) - first)
    owner = codes // num_items
    seen_below = np.searchsorted(unseen_below, codes, side="right") - np.searchsorted(seen, owner * num_items)
    return (codes - owner * num_items + seen_below).astype(np.int32)


@dataclass(frozen=True)
class Table:
    """Rows as columns of equal length; ``rating`` is 0 where ``watched`` is 0 and no loss is taken there."""

    user: npt.NDArray[np.int32]
    item: npt.NDArray[np.int32]
    watched: npt.NDArray[np.uint8]
    rating: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.user)

    def take(self, rows: Index) -> Table:
        """Return the given rows in the given order."""
        return Table(self.user[rows], self.item[rows], self.watched[rows], self.rating[rows])


def rated(user: npt.NDArray[np.int32], item: npt.NDArray[np.int32], rating: npt.NDArray[np.float32]) -> Table:
    """Return the table of rated pairs alone."""
    return Table(user, item, np.ones(len(user), dtype=np.uint8), rating)


def with_unrated(positives: Table, num_users: int, num_items: int, rng: np.random.Generator) -> Table:
    """Append, by ascending user, as many unrated pairs as the user rated (or as there are, if fewer).

    Every pair may occur once in ``positives``.
    """
    counts = balanced_counts(positives.user, num_users, num_items)
    item = draw_unseen(positives.user, positives.item, counts, num_items, rng)
    user = np.repeat(np.arange(num_users, dtype=np.int32), counts)
    return Table(
        np.concatenate([positives.user, user]),
        np.concatenate([positives.item, item]),
        np.concatenate([positives.watched, np.zeros(len(user), dtype=np.uint8)]),
        np.concatenate([positives.rating, np.zeros(len(user), dtype=np.float32)]),
    )


def draft(
    parts: tuple[Table, Table, Table], users: Vocabulary, items: Vocabulary, meta: dict[str, Any]
) -> RawDataset:
    """Lay out train, validation and test tables for the cache."""
    train, validation, test = (
        RawSplit({"user": part.user, "item": part.item}, {"watched": part.watched, "rating": part.rating})
        for part in parts
    )
    meta = {"num_users": len(users), "num_items": len(items), "keys": "user", **meta}
    return RawDataset(train, validation, test, meta, {"user": users, "item": items})


def take_parts(table: Table, parts: tuple[Index, Index, Index]) -> tuple[Table, Table, Table]:
    """Cut a table by the row numbers of train, validation and test."""
    return table.take(parts[0]), table.take(parts[1]), table.take(parts[2])
