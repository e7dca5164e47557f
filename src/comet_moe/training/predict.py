"""New rows through a trained rating model.

A user or an item that was not in the run's data is given the mean of the trained embeddings of the known.
Hash gates route by user: an unknown one takes the expert of the known user whose number is the CRC-32 of the
id modulo the number of users, so that the same id always goes the same way.
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

from comet_moe.data import read_pairs
from comet_moe.exceptions import RunError
from comet_moe.io import write_atomically
from comet_moe.models import RatingModel
from comet_moe.training.distributed import num_threads
from comet_moe.training.evaluate import EVALUATION_BATCH
from comet_moe.training.run import LoadedRun

Numbers = npt.NDArray[np.int32]

_WRITERS: dict[str, Callable[[pd.DataFrame, Path], Any]] = {
    ".csv": lambda table, path: table.to_csv(path, index=False),
    ".tsv": lambda table, path: table.to_csv(path, index=False, sep="\t"),
    ".parquet": lambda table, path: table.to_parquet(path, index=False),
}


def predict(run: LoadedRun, table: Path) -> pd.DataFrame:
    """Score the pairs of ``table`` (.csv, .tsv or .parquet with a user and an item in each row).

    Returns:
        The pairs in their order as ``user`` and ``item``, ``watched`` (probability), ``rating`` (in the units
        of the run's raw data) and ``known`` ("both", "user", "item" or "neither": which of the two the run
        has seen).
    """
    model = run.model
    if not isinstance(model, RatingModel):
        raise RunError(f"{run.folder.path} is a run on images: predict takes rating models")
    options = run.config.data.options
    columns = {role: options[role] for role in ("user", "item") if options.get(role) is not None}
    pairs = read_pairs(table, columns, with_rating=False)
    user, item = (run.folder.vocabulary(name).encode(pairs[name]) for name in ("user", "item"))
    keys = np.where(user < 0, _stand_in(pairs["user"], model.users.num_embeddings), user)
    with num_threads(run.config.training.threads):
        watched, rating = _scores(model, user, item, keys)
    rating = rating * run.data.get("rating_std", 1.0) + run.data.get("rating_mean", 0.0)
    known = np.array(["neither", "user", "item", "both"])[(user >= 0) + 2 * (item >= 0)]
    return pairs[["user", "item"]].assign(watched=watched, rating=rating.astype(np.float32), known=known)


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write ``table`` in the format that ``path`` ends in; a file is whole or not there."""
    write_atomically(path, lambda aside: _WRITERS[writable_suffix(path)](table, aside))


def writable_suffix(path: Path) -> str:
    """The ending of ``path``, if a table can be written so."""
    if path.suffix not in _WRITERS:
        raise RunError(f"{path} ends in {path.suffix!r}: name a .csv, .tsv or .parquet file")
    return path.suffix


@torch.no_grad()
def _scores(
    model: RatingModel, user: Numbers, item: Numbers, keys: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Probability of "watched" and the rating in the model's units, (N,) each; -1 is an unknown id."""
    mean_user, mean_item = model.users.weight.mean(0), model.items.weight.mean(0)
    outputs: list[list[Tensor]] = []
    for start in range(0, len(user), EVALUATION_BATCH):
        rows = slice(start, start + EVALUATION_BATCH)
        scores, _ = model.from_embeddings(
            _rows_or(mean_user, model.users.weight, user[rows]),
            _rows_or(mean_item, model.items.weight, item[rows]),
            torch.from_numpy(keys[rows]),
        )
        outputs.append(scores)
    logit, rating = (torch.cat(parts).squeeze(-1) for parts in zip(*outputs, strict=True))
    return logit.sigmoid().numpy(), rating.numpy()


def _rows_or(mean: Tensor, weight: Tensor, numbers: Numbers) -> Tensor:
    """Rows of ``weight`` (v, d) by number, ``mean`` (d,) for -1: (B,) -> (B, d)."""
    index = torch.from_numpy(numbers).long()
    return torch.where((index < 0).unsqueeze(-1), mean, weight[index.clamp_min(0)])


def _stand_in(ids: pd.Series, users: int) -> npt.NDArray[np.int64]:
    """The number of the known user in whose place a hash gate puts each id."""
    codes, distinct = pd.factorize(ids)
    return np.array([zlib.crc32(str(name).encode()) % users for name in distinct], dtype=np.int64)[codes]
