"""Predictions of a trained rating model for new pairs of user and item.

A user or an item that was not in the data of the run gets the mean of the trained embeddings. Hash gates
route by user: an unknown one takes the expert of the known user whose index is the CRC-32 of the id modulo
the number of users, so that an id always has the same expert.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from comet_moe.devices import Placement
from comet_moe.exceptions import RunError
from comet_moe.experiments.data import read_pairs
from comet_moe.experiments.data.vocabulary import id_text
from comet_moe.experiments.models import RatingModel
from comet_moe.experiments.training.distributed import num_threads
from comet_moe.experiments.training.evaluate import EVALUATION_BATCH
from comet_moe.experiments.training.load import LoadedRun
from comet_moe.files import write_atomically

Indices = npt.NDArray[np.int32]

_WRITERS: dict[str, Callable[[pd.DataFrame, Path], Any]] = {
    ".csv": lambda table, path: table.to_csv(path, index=False),
    ".tsv": lambda table, path: table.to_csv(path, index=False, sep="\t"),
    ".parquet": lambda table, path: table.to_parquet(path, index=False),
}


def predict(run: LoadedRun, table: Path) -> pd.DataFrame:
    """Score the pairs of ``table`` (.csv, .tsv or .parquet with a user and an item in each row).

    Returns:
        The pairs in their order: ``user``, ``item``, ``watched`` (probability), ``rating`` (in the units of
        the raw data of the run) and ``known`` ("both", "user", "item" or "neither": which of the two were in
        the data of the run).
    """
    model = run.model
    if not isinstance(model, RatingModel):
        raise RunError(f"{run.folder.path} is a run on images: give a run of a rating model")
    options = run.config.data.options
    columns = {role: options[role] for role in ("user", "item") if options.get(role) is not None}
    pairs = read_pairs(table, columns, with_rating=False)
    user, item = (run.folder.vocabulary(name).encode(pairs[name]) for name in ("user", "item"))
    keys = np.where(user < 0, _replacement_keys(pairs["user"], model.users.num_embeddings), user)
    with num_threads(run.config.training.threads):
        watched, rating = _scores(model, user, item, keys, run.placement)
    known = np.array(["neither", "user", "item", "both"])[(user >= 0) + 2 * (item >= 0)]
    return pairs[["user", "item"]].assign(watched=watched, rating=rating, known=known)


def write_table(table: pd.DataFrame, path: Path, escape_formulas: bool = False) -> None:
    """Write ``table`` atomically, in the format of the suffix of ``path``.

    Args:
        table: the rows.
        path: a .csv, .tsv or .parquet file.
        escape_formulas: write an apostrophe before texts that a spreadsheet would run as a formula.
    """
    if escape_formulas:
        table = table.rename(columns=_escape_formula).map(_escape_formula)
    write_atomically(path, lambda temporary: _WRITERS[check_suffix(path)](table, temporary))


def check_suffix(path: Path) -> str:
    """The suffix of ``path``, if tables can be written in its format."""
    if path.suffix not in _WRITERS:
        raise RunError(f"{path} ends in {path.suffix!r}: give a .csv, .tsv or .parquet file")
    return path.suffix


def _escape_formula(value: Any) -> Any:
    return (
        f"'{value}"
        if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        else value
    )


@torch.no_grad()
def _scores(
    model: RatingModel, user: Indices, item: Indices, keys: npt.NDArray[np.int64], placement: Placement
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Probability of "watched" and the rating in raw units, (N,) each; index -1 is an unknown id."""
    mean_user, mean_item = model.users.weight.mean(0), model.items.weight.mean(0)
    outputs: list[list[Tensor]] = []
    for start in range(0, len(user), EVALUATION_BATCH):
        rows = slice(start, start + EVALUATION_BATCH)
        with placement.autocast():
            scores, _ = model.from_embeddings(
                _embed(mean_user, model.users.weight, user[rows]),
                _embed(mean_item, model.items.weight, item[rows]),
                placement.move(torch.from_numpy(keys[rows])),
            )
        outputs.append([score.float().cpu() for score in scores])
    by_task = (torch.cat(batches) for batches in zip(*outputs, strict=True))
    watched, rating = (
        task.predict(output).numpy() for task, output in zip(model.tasks, by_task, strict=True)
    )
    return watched, rating


def _embed(mean: Tensor, weight: Tensor, indices: Indices) -> Tensor:
    """Rows of ``weight`` (v, d), or ``mean`` (d,) for -1: (B,) -> (B, d)."""
    index = torch.from_numpy(indices).long().to(weight.device)
    return torch.where((index < 0).unsqueeze(-1), mean, weight[index.clamp_min(0)])


def _replacement_keys(ids: pd.Series, users: int) -> npt.NDArray[np.int64]:
    """The index of a known user for each id, for hash gates."""
    codes, distinct = pd.factorize(ids)
    return np.array([zlib.crc32(id_text(name).encode()) % users for name in distinct], dtype=np.int64)[codes]
