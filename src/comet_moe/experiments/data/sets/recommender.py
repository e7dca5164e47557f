"""The two-task table of recommender sets: does the user take the item (``watched``), and how is it rated.

Negatives, pairs of a user and an item that are not in the table, are added to the rated pairs. They are
sampled without replacement for all users at once. A user's unseen items are numbered 0..U-1 (their ranks).
Distinct ranks are sampled by drawing again for repeated ones, then turned into items. Where more than half
of the unseen items are wanted, those to leave out are sampled: each round then about halves what is missing.
Time and memory grow with the number of pairs, never with users x items.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.cache import RawDataset, RawSplit, Request
from comet_moe.experiments.data.splits import Sizes, stratified_split
from comet_moe.experiments.data.vocabulary import Vocabulary

Ids = npt.NDArray[np.int32]  # contiguous numbers of users or items
Ints = npt.NDArray[np.int64]


def make_table(
    user: Ids,
    item: Ids,
    rating: npt.NDArray[np.float32] | float,
    watched: npt.NDArray[np.bool_] | bool = True,
) -> pd.DataFrame:
    """Columns user, item, watched (uint8) and rating; no loss is taken of a rating that is not watched."""
    table = pd.DataFrame({"user": user, "item": item, "watched": watched, "rating": rating})
    return table.astype({"watched": np.uint8, "rating": np.float32})


def add_unrated_pairs(
    rated: pd.DataFrame, num_users: int, num_items: int, rng: np.random.Generator
) -> pd.DataFrame:
    """Append, by ascending user, as many unrated pairs as the user rated (or as there are, if fewer).

    Every pair may occur once in ``rated``.
    """
    user, item = rated["user"].to_numpy(), rated["item"].to_numpy()
    counts = count_negatives(user, num_users, num_items)
    unrated_item = sample_unseen_items(user, item, counts, num_items, rng)
    unrated_user = np.repeat(np.arange(num_users, dtype=np.int32), counts)
    return pd.concat([rated, make_table(unrated_user, unrated_item, 0.0, watched=False)], ignore_index=True)


def split_table(table: pd.DataFrame, sizes: Sizes, request: Request) -> list[pd.DataFrame]:
    """Split the rows at random so that each split has its share of watched rows."""
    rows = stratified_split(table["watched"].to_numpy() == 1, sizes, request.make_rng("split"))
    return [table.iloc[index] for index in rows]


def make_raw_dataset(
    tables: Sequence[pd.DataFrame], users: Vocabulary, items: Vocabulary, meta: dict[str, Any]
) -> RawDataset:
    """Return the data set of a train, a validation and a test table."""
    splits = []
    for table in tables:
        columns = {name: table[name].to_numpy() for name in table}
        targets = {name: columns.pop(name) for name in ("watched", "rating")}
        splits.append(RawSplit(columns, targets))
    meta = {"num_users": len(users), "num_items": len(items), **meta}
    return RawDataset(splits, meta, {"user": users, "item": items})


def count_negatives(user: Ids, num_users: int, num_items: int) -> Ints:
    """Return for each user with n seen items min(n, num_items - n): as many unseen items, if there are."""
    seen = np.bincount(user, minlength=num_users)
    return np.minimum(seen, num_items - seen)


def sample_unseen_items(user: Ids, item: Ids, counts: Ints, num_items: int, rng: np.random.Generator) -> Ids:
    """Sample counts[u] items that user u has not seen, uniformly without replacement.

    Args:
        user, item: (N,) the seen pairs, each once.
        counts: (num_users,) how many items to sample per user.
        num_items: items are 0..num_items-1.
        rng: the source of randomness.

    Returns:
        Items (sum of counts,), grouped by ascending user.
    """
    unseen = num_items - np.bincount(user, minlength=len(counts))
    if (counts > unseen).any():
        worst = int(np.argmax(counts - unseen))
        raise DataError(
            f"user number {worst} needs {counts[worst]} unseen items but has {unseen[worst]}; ask for fewer."
        )
    few = 2 * counts <= unseen
    codes = _sample_ranks(np.where(few, counts, unseen - counts), unseen, num_items, rng)
    is_chosen = few[codes // num_items]  # else the code is one to leave out
    of_many = _all_ranks(np.where(few, 0, unseen), num_items)
    of_many = np.setdiff1d(of_many, codes[~is_chosen], assume_unique=True)
    return _items_of_ranks(np.sort(np.concatenate([codes[is_chosen], of_many])), user, item, num_items)


def _sample_ranks(counts: Ints, limits: Ints, base: int, rng: np.random.Generator) -> Ints:
    """Sorted codes user * base + rank of counts[u] distinct ranks below limits[u] for each user u."""
    codes: Ints = np.empty(0, dtype=np.int64)
    missing = counts
    while missing.any():
        user = np.repeat(np.arange(len(counts)), missing)
        codes = _sorted_distinct(np.concatenate([codes, user * base + rng.integers(0, limits[user])]))
        missing = counts - np.bincount(codes // base, minlength=len(counts))
    return codes


def _sorted_distinct(codes: Ints) -> Ints:
    """Sort and drop repeats; np.unique hashes, which takes 50 times as long on these codes."""
    codes = np.sort(codes)
    return codes[np.append(True, codes[1:] != codes[:-1])]


def _all_ranks(counts: Ints, base: int) -> Ints:
    """Sorted codes user * base + rank of the ranks 0..counts[u]-1 of each user u."""
    user = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return user * base + np.arange(len(user)) - first[user]


def _items_of_ranks(codes: Ints, user: Ids, item: Ids, num_items: int) -> Ids:
    """The unseen item of rank q is q + the number of j with i_j - j <= q, i_j the user's j-th seen item."""
    seen = np.sort(user.astype(np.int64) * num_items + item)
    first = np.searchsorted(seen, seen // num_items * num_items)
    unseen_below = seen - (np.arange(len(seen)) - first)
    owner = codes // num_items
    seen_below = np.searchsorted(unseen_below, codes, side="right") - np.searchsorted(seen, owner * num_items)
    return (codes - owner * num_items + seen_below).astype(np.int32)
