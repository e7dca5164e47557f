"""Jester: every pair of a user and a joke is a row; is it rated, and how ([-10, 10], standardised)."""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.cache import RawDataset, Request
from comet_moe.experiments.data.raw_files import (
    RequiredFile,
    read_csv,
    require_fitting,
    require_official_count,
    require_rows,
    wrap_read_errors,
)
from comet_moe.experiments.data.sets.ratings import make_raw_dataset, make_table, split_table
from comet_moe.experiments.data.splits import percent_sizes
from comet_moe.experiments.data.vocabulary import Vocabulary

# Published in three parts as .xls in .zip archives; "ratings_x100" of an .npz has the same ratings as int16.
JESTER_FILES = tuple(
    RequiredFile(
        f"part {part}",
        (
            f"jester-data-{part}.csv",
            f"jester-data-{part}.zip",
            f"jester_dataset_1_{part}.zip",
            f"jester_data_{part}.npz",
            *(("jester_all_users_jokes_1_10.npz",) if part == 1 else ()),  # all parts, ten jokes only
            f"jester-data-{part}.xls",
        ),
        required=part == 1,
    )
    for part in (1, 2, 3)
)
_OFFICIAL_USERS = {"part 1": 24_983, "part 2": 23_500, "part 3": 24_938}
_ALL_USERS = sum(_OFFICIAL_USERS.values())
_ALL_JOKES = 100
_NOT_RATED = 99.0  # as published
Matrix = npt.NDArray[np.float32]  # users x jokes


def build_jester(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Stack the parts that are there and split all pairs 70/15/15 %, stratified by rated or not."""
    parts = {role: _read_part(path) for role, path in files.items()}
    jokes = parts["part 1"].shape[1]
    for role, path in files.items():
        if parts[role].shape[1] != jokes:
            raise DataError(
                f"{path} has {parts[role].shape[1]} jokes where {files['part 1']} has {jokes}; "
                f"give parts of one release."
            )
        official = _ALL_USERS if "all_users" in path.name else _OFFICIAL_USERS[role]
        require_official_count(path, "users", len(parts[role]), official, request.strict)
    ratings = np.concatenate(list(parts.values()))
    user, item = (index.ravel().astype(np.int32) for index in np.indices(ratings.shape))
    is_rated = ratings.ravel() != _NOT_RATED
    table = make_table(user, item, ratings.ravel(), is_rated)
    tables = split_table(table, percent_sizes(len(table), 70), request)
    train = tables[0].loc[tables[0]["watched"] == 1, "rating"].to_numpy(np.float64)
    if not len(train) or train.std() == 0:
        raise DataError("the train ratings of Jester are all equal or missing; give more users.")
    mean, deviation = float(train.mean()), float(train.std())
    for index, part in enumerate(tables):
        scaled = (part["rating"] - np.float32(mean)) / np.float32(deviation)
        tables[index] = part.assign(rating=scaled.where(part["watched"] == 1, np.float32(0)))
    notes = [
        "ratings are standardised by the train ratings' mean and deviation (ours: the paper gives no scale)",
        "user ids are row numbers over the parts in order, joke ids column numbers, both from 1",
    ]
    if ratings.shape != (_ALL_USERS, _ALL_JOKES):
        notes.append(
            f"{len(ratings):,} users and {jokes} jokes of the paper's {_ALL_USERS:,} and {_ALL_JOKES}"
        )
    meta = {"rating_mean": mean, "rating_std": deviation, "notes": notes}
    users, items = (Vocabulary([str(number + 1) for number in range(size)]) for size in ratings.shape)
    return make_raw_dataset(tables, users, items, meta)


def _read_part(path: Path) -> Matrix:
    """Return one part as users x jokes, 99 where not rated."""
    if path.suffix == ".npz":
        _require_fitting_archive(path)
        with wrap_read_errors(path, "Jester .npz"), np.load(path, allow_pickle=False) as arrays:
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


def _require_fitting_archive(path: Path) -> None:
    with wrap_read_errors(path, "archive"), zipfile.ZipFile(path) as archive:
        require_fitting(path, 10 * sum(member.file_size for member in archive.infolist()))


def _read_csv(path: Path) -> Matrix:
    """Read a .csv, or the one in a .zip: the number of ratings, then one column per joke."""
    if path.suffix == ".xls":
        raise DataError(f"{path} is an Excel table, which cannot be read here; save it as {path.stem}.csv.")
    if path.suffix == ".zip":
        _require_fitting_archive(path)
    table = read_csv(path, "Jester table", header=None, dtype=np.float32).to_numpy()
    if table.shape[1] < 2:
        raise DataError(
            f"{path} has {table.shape[1]} columns; it must have a number of ratings and one column per joke."
        )
    return np.ascontiguousarray(table[:, 1:])
