"""Recommender sets of two tasks: does the user take the item (``watched``), and how is it rated.

``ratings`` is the user's own table, with a user, an item and a rating in each row. The other recommender sets
are built by the same functions.

Negatives, pairs of a user and an item that are not in the table, are added to the rated pairs. They are
sampled without replacement for all users at once. A user's unseen items are numbered 0..U-1 (their ranks).
Distinct ranks are sampled by drawing again for repeated ones, then turned into items. Where more than half
of the unseen items are wanted, those to leave out are sampled: each round then about halves what is missing.
Time and memory grow with the number of pairs, never with users x items.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.cache import RawDataset, RawSplit, Request
from comet_moe.experiments.data.raw_files import RequiredFile, require_columns
from comet_moe.experiments.data.splits import Sizes, percent_sizes, stratified_split
from comet_moe.experiments.data.table.source import read_column_names, read_table
from comet_moe.experiments.data.vocabulary import Vocabulary

Ids = npt.NDArray[np.int32]  # contiguous numbers of users or items
Ints = npt.NDArray[np.int64]

RATINGS_FILES = (RequiredFile("table", ("*.csv", "*.tsv", "*.parquet")),)
RATINGS_OPTIONS = {"user": None, "item": None, "rating": None, "negatives": True}

# Names that are recognised without an option, in lower case without spaces, "-" and "_"; the first one wins.
_COMMON_NAMES = {
    "user": (
        *("user", "userid", "uid", "customer", "customerid"),
        *("reader", "readerid", "reviewer", "reviewerid"),
    ),
    "item": (
        *("item", "itemid", "iid", "movie", "movieid", "book", "bookid", "isbn"),
        *("joke", "jokeid", "product", "productid", "asin"),
    ),
    "rating": ("rating", "ratings", "bookrating", "score", "stars", "value"),
}


def build_ratings(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Build rated pairs, and as many unrated ones per user unless ``negatives`` is off, split 80/10/10 %."""
    path, negatives = files["table"], request.options["negatives"]
    if not isinstance(negatives, bool):
        raise DataError(f"option negatives is {negatives!r}; give true or false.")
    names = {role: request.options[role] for role in _COMMON_NAMES if request.options[role] is not None}
    raw = read_pairs(path, names)
    if "rating" not in raw:
        raise DataError(_missing_role(path, "rating", read_column_names(path)))
    distinct = raw.drop_duplicates(["user", "item"], keep="last")
    users, items = Vocabulary.build(distinct["user"]), Vocabulary.build(distinct["item"])
    table = make_table(
        users.encode(distinct["user"]),
        items.encode(distinct["item"]),
        distinct["rating"].to_numpy(np.float32),
    )
    notes = ["split 80/10/10 %"]
    if len(distinct) < len(raw):
        notes.append(f"{len(raw) - len(distinct):,} rows repeat a pair; the last row of each pair is kept")
    if negatives:
        table = add_unrated_pairs(table, len(users), len(items), request.make_rng("negatives"))
    tables = split_table(table, percent_sizes(len(table), 80), request)
    return make_raw_dataset(tables, users, items, {"notes": notes})


def read_pairs(
    path: Path, columns: Mapping[str, str] | None = None, with_rating: bool = True
) -> pd.DataFrame:
    """Read a table of pairs: columns ``user`` and ``item`` (ids), and ``rating`` (float32) if it is there.

    Args:
        path: a file that ends in .csv, .tsv or .parquet.
        columns: the names of columns that have no common name, such as ``{"user": "who", "item": "what"}``.
        with_rating: whether to read the rating.
    """
    chosen = _choose_columns(path, read_column_names(path), dict(columns or {}))
    if not with_rating:
        chosen.pop("rating", None)
    raw = read_table(path, dict.fromkeys(chosen.values()))
    pairs = pd.DataFrame({role: raw[name] for role, name in chosen.items()}, copy=False)
    for role, name in chosen.items():
        if not _holds_ids(pairs[role]):
            raise DataError(
                f"{path} has the column {name} as {pairs[role].dtype}; a {role} must be a number or text."
            )
    for role in ("user", "item"):
        _require_values(path, chosen[role], pairs[role], pairs[role].isna().to_numpy(), "an id")
    if "rating" in pairs:
        with np.errstate(over="ignore"):  # what float32 cannot hold is refused below
            ratings = pd.to_numeric(pairs["rating"], errors="coerce").to_numpy(np.float32, na_value=np.nan)
        _require_values(path, chosen["rating"], pairs["rating"], ~np.isfinite(ratings), "a finite number")
        pairs["rating"] = ratings
    return pairs


def _choose_columns(path: Path, present: list[str], named: dict[str, str]) -> dict[str, str]:
    """Return the column of each role: the one that ``named`` says, else the first with a common name."""
    require_columns(path, named.values(), present)
    by_plain_name = {re.sub("[-_ ]", "", name.lower()): name for name in reversed(present)}
    chosen = {}
    for role, common in _COMMON_NAMES.items():
        name = named.get(role) or next((by_plain_name[key] for key in common if key in by_plain_name), None)
        if name is not None:
            chosen[role] = name
        elif role != "rating":
            raise DataError(_missing_role(path, role, present))
    return chosen


def _missing_role(path: Path, role: str, present: list[str]) -> str:
    return (
        f"{path} has no {role} column with a common name; its columns are {', '.join(present)}: "
        f"name one with the option {role}."
    )


def _holds_ids(column: pd.Series) -> bool:
    types = pd.api.types
    values = column.cat.categories if isinstance(column.dtype, pd.CategoricalDtype) else column
    is_number = types.is_numeric_dtype(values) and not types.is_bool_dtype(values)
    return bool(is_number or types.is_string_dtype(values))


def _require_values(
    path: Path, column: str, values: pd.Series, wrong: npt.NDArray[np.bool_], what: str
) -> None:
    if wrong.any():
        row = int(wrong.argmax())
        (value,) = values.iloc[[row]].tolist()
        text = "no value" if pd.isna(value) else repr(value)
        raise DataError(f"{path} has {text} in column {column}, data row {row + 1}; it must be {what}.")


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
