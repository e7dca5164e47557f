"""Book-Crossing: is a rating explicit (1..10) or implicit (0), and how high is it where it is explicit."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.cache import RawDataset, Request
from comet_moe.experiments.data.raw_files import (
    RequiredFile,
    read_csv,
    require_columns,
    require_official_count,
    require_range,
    wrap_read_errors,
)
from comet_moe.experiments.data.sets.ratings import make_raw_dataset, make_table, split_table
from comet_moe.experiments.data.splits import percent_sizes
from comet_moe.experiments.data.table.source import read_table
from comet_moe.experiments.data.vocabulary import Vocabulary

# The second is a part of the records as a Parquet file, with plain column names.
BOOKS_FILES = (RequiredFile("ratings", ("BX-Book-Ratings.csv", "ratings_subset.parquet")),)
_COLUMNS = {"User-ID": "user_id", "ISBN": "isbn", "Book-Rating": "rating"}  # published name: our name
_OFFICIAL_ROWS = 1_149_780
_MIN_RECORDS = 5  # of each user and each book, as in the paper


def build_books(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Keep users and books with at least 5 records each and split them 70/15/15 %, stratified by explicit."""
    path = files["ratings"]
    notes = ["task 1 tells explicit ratings (1..10) from implicit ones (0); no pairs are added"]
    if path.suffix == ".parquet":
        raw = read_table(path, _COLUMNS.values())
        notes.append(f"{len(raw):,} of the {_OFFICIAL_ROWS:,} official records")
    else:
        raw = _read_csv(path)
        require_official_count(path, "records", len(raw), _OFFICIAL_ROWS, request.strict)
    require_range(path, "rating", raw["rating"], 0, 10)
    is_incomplete = raw.isna().any(axis=1).to_numpy() | (raw["isbn"].str.strip() == "").to_numpy(bool)
    if is_incomplete.any():
        row = int(is_incomplete.argmax())
        raise DataError(f"{path} lacks a user or an ISBN in data row {row + 1}; download it again.")
    raw = _drop_rare(raw)
    if raw.empty:
        raise DataError(
            f"{path} has no users and books with at least {_MIN_RECORDS} records each; give more records."
        )
    users, items = Vocabulary.build(raw["user_id"]), Vocabulary.build(raw["isbn"])
    rating = raw["rating"].to_numpy(np.float32)
    table = make_table(users.encode(raw["user_id"]), items.encode(raw["isbn"]), rating, rating > 0)
    tables = split_table(table, percent_sizes(len(table), 70), request)
    return make_raw_dataset(tables, users, items, {"notes": notes})


def _read_csv(path: Path) -> pd.DataFrame:
    """Read the published file: Latin-1, separated by semicolons, quotes escaped by backslashes."""
    kind, types = "Book-Crossing table", {"ISBN": "str"}
    raw = read_csv(path, kind, sep=";", encoding="latin-1", escapechar="\\", dtype=types, na_filter=False)
    require_columns(path, _COLUMNS, raw.columns)
    raw = raw[list(_COLUMNS)].rename(columns=_COLUMNS)
    with wrap_read_errors(path, kind):
        return raw.astype({"user_id": np.int64, "rating": np.int64})


def _drop_rare(raw: pd.DataFrame) -> pd.DataFrame:
    """Drop users and books with fewer than 5 records, again and again: dropping one may make another rare."""
    while True:
        counts = [raw.groupby(column)["rating"].transform("size") for column in ("user_id", "isbn")]
        keep = np.minimum(*counts) >= _MIN_RECORDS
        if keep.all():
            return raw
        raw = raw[keep]
