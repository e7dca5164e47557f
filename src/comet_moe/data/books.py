"""Book-Crossing: explicit ratings (1..10) against implicit ones (0), and the rating where explicit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

import comet_moe.data.recommender as recommender
from comet_moe.data.io import (
    RequiredFile,
    check_count,
    read_parquet,
    reading,
    require_columns,
    require_range,
    require_rows,
)
from comet_moe.data.recommender import Table
from comet_moe.data.splits import percent_sizes, stratified_split
from comet_moe.data.types import RawDataset, Request
from comet_moe.data.vocabulary import Vocabulary
from comet_moe.exceptions import DataError

NEEDS = (RequiredFile("ratings", ("BX-Book-Ratings.csv", "ratings_subset.parquet")),)
_OFFICIAL_ROWS = 1_149_780
_MINIMUM = 5
_NAMES = {"User-ID": "user_id", "ISBN": "isbn", "Book-Rating": "rating"}


def build(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Keep users and books with at least 5 records each and split them 70/15/15 %, stratified by explicit."""
    path = files["ratings"]
    raw = read_parquet(path, _NAMES.values()) if path.suffix == ".parquet" else _read_csv(path)
    notes = ["task 1 tells explicit ratings (1..10) from implicit ones (0); no pairs are added"]
    if path.suffix == ".parquet":
        notes.append(f"{len(raw):,} of the {_OFFICIAL_ROWS:,} official records")
    else:
        check_count(path, "records", len(raw), _OFFICIAL_ROWS, request.strict)
    require_range(path, "rating", raw["rating"], 0, 10)
    if raw.isna().to_numpy().any():
        row = int(raw.isna().any(axis=1).to_numpy().argmax())
        raise DataError(f"{path} lacks a user or an ISBN in data row {row + 1}; fetch it again.")
    raw = _frequent(raw)
    if raw.empty:
        raise DataError(
            f"{path} has no users and books with at least {_MINIMUM} records each; give more records."
        )
    users, items = Vocabulary.build(raw["user_id"]), Vocabulary.build(raw["isbn"])
    rating = raw["rating"].to_numpy(np.float32)
    watched = (rating > 0).astype(np.uint8)
    table = Table(users.encode(raw["user_id"]), items.encode(raw["isbn"]), watched, rating)
    split = stratified_split(watched == 1, percent_sizes(len(table), 70), request.stream("split"))
    return recommender.draft(recommender.take_parts(table, split), users, items, {"notes": notes})


def _read_csv(path: Path) -> pd.DataFrame:
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; fetch it again.")
    with reading(path, "Book-Crossing table"):
        raw = pd.read_csv(
            path,
            sep=";",
            encoding="latin-1",
            quotechar='"',
            escapechar="\\",
            dtype={"ISBN": "str"},
            na_filter=False,
        )
    require_columns(path, _NAMES, raw.columns)
    require_rows(path, len(raw))
    raw = raw[list(_NAMES)].rename(columns=_NAMES)
    with reading(path, "Book-Crossing table"):
        return raw.astype({"user_id": np.int64, "rating": np.int64})


def _frequent(raw: pd.DataFrame) -> pd.DataFrame:
    """Drop users and books with fewer than 5 records until none is left: dropping one may undo the other."""
    user, item = (pd.factorize(raw[column])[0] for column in ("user_id", "isbn"))
    rows = np.arange(len(raw))
    while True:
        keep = (
            (np.bincount(user)[user] >= _MINIMUM) & (np.bincount(item)[item] >= _MINIMUM)
            if len(rows)
            else rows > 0
        )
        if keep.all():
            return raw.iloc[rows]
        rows, user, item = rows[keep], user[keep], item[keep]
