"""The two-task table of the recommender sets: will this user take this item, and how is it rated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from comet_moe.data.draft import Draft, DraftSplit
from comet_moe.data.pairs import balanced_counts, draw_unseen
from comet_moe.data.splits import Index
from comet_moe.data.vocabulary import Vocabulary


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
) -> Draft:
    """Lay out train, validation and test tables for the cache."""
    train, validation, test = (
        DraftSplit({"user": part.user, "item": part.item}, {"watched": part.watched, "rating": part.rating})
        for part in parts
    )
    meta = {"num_users": len(users), "num_items": len(items), "keys": "user", **meta}
    return Draft(train, validation, test, meta, {"user": users, "item": items})


def take_parts(table: Table, parts: tuple[Index, Index, Index]) -> tuple[Table, Table, Table]:
    """Cut a table by the row numbers of train, validation and test."""
    return table.take(parts[0]), table.take(parts[1]), table.take(parts[2])
