"""Jester: every pair of a user and a joke is a row; was it rated, and how ([-10, 10], standardised)."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

import comet_moe.data.recommender as recommender
from comet_moe.data.io import RequiredFile, check_count, reading, require_rows
from comet_moe.data.recommender import Table
from comet_moe.data.splits import percent_sizes, stratified_split
from comet_moe.data.types import RawDataset, Request
from comet_moe.data.vocabulary import Vocabulary
from comet_moe.exceptions import DataError

NEEDS = tuple(
    RequiredFile(
        f"part {part}",
        (
            f"jester-data-{part}.csv",
            f"jester-data-{part}.zip",
            f"jester_dataset_1_{part}.zip",
            f"jester_data_{part}.npz",
            *(("jester_all_users_jokes_1_10.npz",) if part == 1 else ()),
            f"jester-data-{part}.xls",
        ),
        required=part == 1,
    )
    for part in (1, 2, 3)
)
_USERS = {"part 1": 24_983, "part 2": 23_500, "part 3": 24_938}
_ALL_USERS = sum(_USERS.values())
_NOT_RATED = 99.0
Matrix = npt.NDArray[np.float32]


def build(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Stack the parts at hand and split all user x joke pairs 70/15/15 %, stratified by rated or not."""
    parts = {role: _read(path) for role, path in files.items()}
    for role, path in files.items():
        jokes = parts["part 1"].shape[1]
        if parts[role].shape[1] != jokes:
            raise DataError(f"{path} has {parts[role].shape[1]} jokes where {files['part 1']} has {jokes}.")
        expected = _ALL_USERS if "all_users" in path.name else _USERS[role]
        check_count(path, "users", len(parts[role]), expected, request.strict)
    ratings = np.concatenate(list(parts.values()))
    table, mean, deviation, split = _standardised(ratings, request)
    notes = [
        "ratings are standardised by the train ratings' mean and deviation (ours: the paper gives no scale)",
        "user ids are row numbers over the parts in order, joke ids column numbers, both from 1",
    ]
    if len(ratings) != _ALL_USERS or ratings.shape[1] != 100:
        notes.append(
            f"{len(ratings):,} users and {ratings.shape[1]} jokes of the paper's {_ALL_USERS:,} and 100"
        )
    meta = {"rating_mean": mean, "rating_std": deviation, "notes": notes}
    users, items = (Vocabulary([str(number + 1) for number in range(size)]) for size in ratings.shape)
    return recommender.draft(recommender.take_parts(table, split), users, items, meta)


def _standardised(
    ratings: Matrix, request: Request
) -> tuple[Table, float, float, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    num_users, num_items = ratings.shape
    flat = ratings.ravel()
    rated = flat != _NOT_RATED
    split = stratified_split(rated, percent_sizes(len(flat), 70), request.stream("split"))
    known = flat[split[0]][rated[split[0]]].astype(np.float64)
    if not len(known) or known.std() == 0:
        raise DataError(
            "the train ratings of Jester are all equal or none; give more users, so that they differ."
        )
    mean, deviation = float(known.mean()), float(known.std())
    scaled = np.where(rated, (flat - np.float32(mean)) / np.float32(deviation), np.float32(0))
    table = Table(
        np.repeat(np.arange(num_users, dtype=np.int32), num_items),
        np.tile(np.arange(num_items, dtype=np.int32), num_users),
        rated.astype(np.uint8),
        scaled,
    )
    return table, mean, deviation, split


def _read(path: Path) -> Matrix:
    """Return one part as users x jokes, 99 where not rated."""
    if path.suffix == ".npz":
        with reading(path, "Jester .npz"), np.load(path) as arrays:
            ratings = arrays["ratings_x100"].astype(np.float32) / 100
    else:
        ratings = _read_csv(path)
    require_rows(path, len(ratings))
    wrong = ~((np.abs(ratings) <= 10) | (ratings == _NOT_RATED))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise DataError(
            f"{path} has {ratings[row, column]:g} as the rating of joke {column + 1} in row {row + 1}; "
            f"it must be in -10..10, or 99 for not rated."
        )
    return ratings


def _read_csv(path: Path) -> Matrix:
    content: Path | io.BytesIO = path
    member = path.name
    if path.suffix == ".zip":
        with reading(path, "zip archive"), zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            member = next((name for name in names if name.endswith(".csv")), names[0] if names else "")
            content = io.BytesIO(archive.read(member) if member else b"")
    if member.endswith((".xls", ".xlsx")):
        raise DataError(
            f"{path} is an Excel table, which cannot be read here; save it as {Path(member).stem}.csv."
        )
    with reading(path, "Jester table"):
        table = pd.read_csv(content, header=None, dtype=np.float32).to_numpy()
    if table.shape[1] < 2:
        raise DataError(
            f"{path} has {table.shape[1]} columns; give the count of ratings and one column a joke."
        )
    counts, ratings = table[:, 0], table[:, 1:]
    found = (ratings != _NOT_RATED).sum(axis=1)
    wrong = counts != found
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{path} counts {counts[row]:g} ratings in row {row + 1} but has {found[row]}; "
            f"the first column must be their number: fetch it again."
        )
    return np.ascontiguousarray(ratings)
