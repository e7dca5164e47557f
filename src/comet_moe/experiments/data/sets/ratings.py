"""``ratings``: the user's own table, with a user, an item and a rating in each row."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.cache import RawDataset, Request
from comet_moe.experiments.data.raw_files import RequiredFile, require_columns
from comet_moe.experiments.data.sets.recommender import (
    add_unrated_pairs,
    make_raw_dataset,
    make_table,
    split_table,
)
from comet_moe.experiments.data.splits import percent_sizes
from comet_moe.experiments.data.table.source import read_column_names, read_table
from comet_moe.experiments.data.vocabulary import Vocabulary

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
    raw = read_table(path, dict.fromkeys(chosen.values()), numbers={chosen.get("rating", "")})
    pairs = pd.DataFrame({role: raw[name] for role, name in chosen.items()}, copy=False)
    for role in ("user", "item"):
        _require_values(path, chosen[role], pairs[role], pairs[role].isna().to_numpy(), "an id")
        if not _holds_ids(pairs[role]):
            raise DataError(
                f"{path} has the column {chosen[role]} as {pairs[role].dtype}; ids must be integers or text."
            )
    if "rating" in pairs:
        if not _holds_ids(pairs["rating"]) or pd.api.types.is_bool_dtype(pairs["rating"]):
            raise DataError(
                f"{path} has the column {chosen['rating']} as {pairs['rating'].dtype}; "
                f"ratings must be numbers."
            )
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
    return bool(types.is_numeric_dtype(values) or types.is_string_dtype(values))


def _require_values(
    path: Path, column: str, values: pd.Series, wrong: npt.NDArray[np.bool_], what: str
) -> None:
    if wrong.any():
        row = int(wrong.argmax())
        (value,) = values.iloc[[row]].tolist()
        text = "no value" if pd.isna(value) else repr(value)
        raise DataError(f"{path} has {text} in column {column}, data row {row + 1}; it must be {what}.")
