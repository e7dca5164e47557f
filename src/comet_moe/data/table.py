"""Tables of the user's own: CSV, TSV or Parquet with a user, an item and perhaps a rating in each row."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

import comet_moe.data.recommender as recommender
from comet_moe.data.io import RequiredFile, read_parquet, reading, require_columns, require_rows
from comet_moe.data.splits import percent_sizes, stratified_split
from comet_moe.data.types import RawDataset, Request
from comet_moe.data.vocabulary import Vocabulary
from comet_moe.exceptions import DataError

NEEDS = (RequiredFile("table", ("*.csv", "*.tsv", "*.parquet")),)
OPTIONS = {"user": None, "item": None, "rating": None, "negatives": True}

# Compared without case, blanks, "-" and "_"; the first that is there is taken.
_COMMON = {
    "user": (
        "user",
        "userid",
        "uid",
        "customer",
        "customerid",
        "reader",
        "readerid",
        "reviewer",
        "reviewerid",
    ),
    "item": (
        *("item", "itemid", "iid", "movie", "movieid", "book", "bookid", "isbn"),
        *("joke", "jokeid", "product", "productid", "asin"),
    ),
    "rating": ("rating", "ratings", "bookrating", "score", "stars", "value"),
}


def build(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Rated pairs, as many unrated ones a user unless ``negatives`` is off, split 80/10/10 % by watched."""
    path = files["table"]
    names = {role: request.options[role] for role in _COMMON if request.options[role] is not None}
    raw = read_pairs(path, names)
    if "rating" not in raw:
        raise DataError(
            f"{path} has no rating column under a common name; its columns are {', '.join(_columns(path))}: "
            f"name one with the option rating."
        )
    distinct = raw.drop_duplicates(["user", "item"], keep="last")
    users, items = Vocabulary.build(distinct["user"]), Vocabulary.build(distinct["item"])
    table = recommender.rated(
        users.encode(distinct["user"]),
        items.encode(distinct["item"]),
        distinct["rating"].to_numpy(np.float32),
    )
    notes = ["split 80/10/10 %"]
    if len(distinct) < len(raw):
        notes.append(f"{len(raw) - len(distinct):,} rows repeat a pair; the last row of each pair is kept")
    if request.options["negatives"]:
        table = recommender.with_unrated(table, len(users), len(items), request.stream("negatives"))
    split = stratified_split(table.watched == 1, percent_sizes(len(table), 80), request.stream("split"))
    return recommender.draft(recommender.take_parts(table, split), users, items, {"notes": notes})


def read_pairs(path: Path, columns: Mapping[str, str] | None = None, rated: bool = True) -> pd.DataFrame:
    """Read a table of pairs: columns ``user`` and ``item`` (ids), and ``rating`` (float32) if it is there.

    ``columns`` names those that do not go by a common name, such as ``{"user": "who", "item": "what"}``.
    Without ``rated`` no rating is looked for.
    """
    chosen = _choose(path, _columns(path), dict(columns or {}))
    if not rated:
        chosen.pop("rating", None)
    if path.suffix == ".parquet":
        raw = read_parquet(path, chosen.values())
    else:
        # Ids stay text: 007 is not 7.
        text = {chosen["user"]: "str", chosen["item"]: "str"}
        with reading(path, "UTF-8 table"):
            raw = pd.read_csv(
                path,
                sep=_separator(path),
                header=0,
                index_col=False,  # a comma at the end of each row does not shift the columns
                names=_columns(path),
                usecols=list(chosen.values()),
                dtype=text,
                encoding="utf-8-sig",
                skipinitialspace=True,
                keep_default_na=False,
                na_values={name: [""] for name in chosen.values()},  # a user called "NA" is one
            )
    require_rows(path, len(raw))
    result = pd.DataFrame({role: raw[name].reset_index(drop=True) for role, name in chosen.items()})
    for role in ("user", "item"):
        _refuse(path, chosen[role], result[role], result[role].isna(), "an id")
        if not _holds_ids(result[role]):
            raise DataError(
                f"{path} has no whole numbers or texts in column {chosen[role]}, where ids are due."
            )
    if "rating" in result:
        numbers = pd.to_numeric(result["rating"], errors="coerce").astype(np.float32)
        _refuse(path, chosen["rating"], result["rating"], ~pd.Series(np.isfinite(numbers)), "a number")
        result["rating"] = numbers
    return result


def _holds_ids(column: pd.Series) -> bool:
    types = pd.api.types
    values = column.cat.categories if isinstance(column.dtype, pd.CategoricalDtype) else column
    return bool(types.is_numeric_dtype(values) or types.is_string_dtype(values))


def _choose(path: Path, present: list[str], named: dict[str, str]) -> dict[str, str]:
    require_columns(path, named.values(), present)
    by_plain_name = {_plain(name): name for name in reversed(present)}
    chosen = {}
    for role, common in _COMMON.items():
        name = named.get(role) or next((by_plain_name[key] for key in common if key in by_plain_name), None)
        if name is not None:
            chosen[role] = name
        elif role != "rating":
            raise DataError(
                f"{path} has no {role} column under a common name; its columns are {', '.join(present)}: "
                f"name one with the option {role}."
            )
    return chosen


def _columns(path: Path) -> list[str]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        with reading(path, "Parquet file"):
            return list(pq.read_schema(path).names)
    if path.suffix not in (".csv", ".tsv"):
        raise DataError(f"{path} ends in {path.suffix!r}; give a .csv, .tsv or .parquet table.")
    return [name.strip() for name in next(csv.reader([_header(path)], delimiter=_separator(path)))]


def _header(path: Path) -> str:
    with reading(path, "UTF-8 table"), path.open(encoding="utf-8-sig") as stream:
        line = stream.readline(1_000_000).rstrip("\n")
    if not line.strip() or "\0" in line:
        state = "is empty" if not line.strip() else "is not text"
        raise DataError(f"{path} {state}; give a table whose first line names its columns.")
    return line


def _separator(path: Path) -> str:
    if path.suffix == ".tsv":
        return "\t"
    header = _header(path)
    return max((",", ";", "\t"), key=header.count)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def _refuse(path: Path, column: str, values: pd.Series, wrong: pd.Series, what: str) -> None:
    if wrong.any():
        row = int(wrong.to_numpy().argmax())
        raise DataError(
            f"{path} has {values.iloc[row]!r} in column {column}, data row {row + 1}, where {what} is due."
        )
