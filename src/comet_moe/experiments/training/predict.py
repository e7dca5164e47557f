"""Predictions of a trained model for the rows of a new table.

Ratings: a user or an item that was not in the data of the run gets the mean of the trained embeddings. Hash
gates route by user. For an unknown user they take the expert of a known one, whose index is the CRC-32 of the
id modulo the number of users. So an id always has the same expert.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import torch
from torch import Tensor

from comet_moe.exceptions import DataError, RunError
from comet_moe.experiments.data import read_pairs
from comet_moe.experiments.data.raw_files import require_columns
from comet_moe.experiments.data.table.encode import Encoder
from comet_moe.experiments.data.table.schema import TableOptions
from comet_moe.experiments.data.table.source import TableSource, find_tables
from comet_moe.experiments.data.vocabulary import id_text
from comet_moe.experiments.models import RatingModel, Task
from comet_moe.experiments.models.base import read_schema
from comet_moe.experiments.training.baselines import Baseline
from comet_moe.experiments.training.distributed import num_threads
from comet_moe.experiments.training.evaluate import EVALUATION_BATCH
from comet_moe.experiments.training.recipe import LoadedRun
from comet_moe.files import write_atomically

_WRITERS: dict[str, Callable[[pd.DataFrame, Path], Any]] = {
    ".csv": lambda table, path: table.to_csv(path, index=False),
    ".tsv": lambda table, path: table.to_csv(path, index=False, sep="\t"),
    ".parquet": lambda table, path: table.to_parquet(path, index=False),
}


Outputs = Callable[[Mapping[str, npt.NDArray[Any]]], list[Tensor]]
"""From encoded rows of a table, (B, ...) each, to one (B, outputs) per task."""


@dataclass(frozen=True)
class Predictions:
    """Predictions for a table, and how the table differs from the training data.

    Attributes:
        frame: one row per row of the table, in its order.
        summary: the differences as counts, plain JSON.
        lines: the differences as sentences.
        notes: what was inferred about the file.
    """

    frame: pd.DataFrame
    summary: dict[str, Any]
    lines: list[str]
    notes: list[str] = field(default_factory=list)


def predict(run: LoadedRun | Baseline, table: Path, keep: Sequence[str] = ()) -> Predictions:
    """Predict all tasks of ``run`` for the rows of ``table``.

    The model of a table predicts the probability of the second class of a binary task. A multiclass task has
    the likeliest class and, as TASK.CLASS, the probability of each. Other tasks have numbers in the units of
    the training data. For the model of ratings see :func:`_predict_pairs`.

    Args:
        run: a run of ratings or of a table, or a baseline on a table.
        table: a .csv, .tsv or .parquet file; for the run of a table also a folder of such, or a pattern.
        keep: columns of a table that come before the predictions, such as an id.
    """
    if isinstance(run, Baseline):
        return _predict_table(run.meta, run.options, run.tasks, run.outputs, table, keep)
    predict_rows = {"rating": _predict_pairs, "table": _predict_network}.get(run.model.kind)
    if predict_rows is None:
        raise RunError(f"{run.folder.path} is a run on images: give a run of ratings or of a table")
    with torch.no_grad(), num_threads(run.config.training.threads):
        return predict_rows(run, table, keep)


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
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value


def _predict_pairs(run: LoadedRun, table: Path, keep: Sequence[str]) -> Predictions:
    """``user``, ``item``, ``watched`` (probability), ``rating`` (in the units of the raw data) and ``known``.

    ``known`` says which of the two were in the data of the run: "both", "user", "item" or "neither".
    """
    if keep:
        raise RunError(
            f"column {keep[0]} cannot be kept: that is for tables, and predictions of ratings have user and "
            f"item already"
        )
    model = cast(RatingModel, run.model)
    options = run.config.data.options
    columns = {role: options[role] for role in ("user", "item") if options.get(role) is not None}
    pairs = read_pairs(table, columns, with_rating=False)
    user, item = (run.folder.vocabulary(name).encode(pairs[name]) for name in ("user", "item"))
    keys = np.where(user < 0, _replacement_keys(pairs["user"], model.users.num_embeddings), user)
    means = [embedding.weight.mean(0) for embedding in (model.users, model.items)]

    def embed(rows: slice) -> tuple[Tensor, Tensor]:
        embedded = [
            _embed(mean, embedding.weight, index[rows])
            for mean, embedding, index in zip(means, (model.users, model.items), (user, item), strict=True)
        ]
        return torch.cat(embedded, -1), run.placement.move(torch.from_numpy(keys[rows]))

    outputs = _run_batches(run, len(user), lambda rows: model.mix(*embed(rows)))
    watched, rating = _predict_tasks(model.tasks, outputs)
    known = np.array(["neither", "user", "item", "both"])[(user >= 0) + 2 * (item >= 0)]
    frame = pairs[["user", "item"]].assign(watched=watched, rating=rating, known=known)
    counts = {name: int((known == name).sum()) for name in ("both", "user", "item", "neither")}
    unknown = len(frame) - counts["both"]
    line = f"{unknown:,} rows have an unknown user or item and use the mean embedding (see column `known`)"
    return Predictions(frame, {"known": counts}, [line])


def _embed(mean: Tensor, weight: Tensor, indices: npt.NDArray[np.int32]) -> Tensor:
    """Rows of ``weight`` (v, d), or ``mean`` (d,) for -1: (B,) -> (B, d)."""
    index = torch.from_numpy(indices).long().to(weight.device)
    return torch.where((index < 0).unsqueeze(-1), mean, weight[index.clamp_min(0)])


def _replacement_keys(ids: pd.Series, users: int) -> npt.NDArray[np.int64]:
    """The index of a known user for each id, for hash gates."""
    codes, distinct = pd.factorize(ids)
    return np.array([zlib.crc32(id_text(name).encode()) % users for name in distinct], dtype=np.int64)[codes]


def network_outputs(run: LoadedRun) -> Outputs:
    """The outputs of each task by the network of a ``run`` on a table."""

    def outputs(features: Mapping[str, npt.NDArray[Any]]) -> list[Tensor]:
        arrays = {name: torch.from_numpy(array) for name, array in features.items()}

        def forward(rows: slice) -> Any:
            return run.model(
                run.placement.move({name: array[rows].clone() for name, array in arrays.items()})
            )

        return _run_batches(run, len(next(iter(arrays.values()))), forward)

    return outputs


def _predict_network(run: LoadedRun, path: Path, keep: Sequence[str]) -> Predictions:
    """Predict for the rows of a table by the network of ``run``."""
    options = run.config.data.options
    return _predict_table(run.meta, options, run.model.tasks, network_outputs(run), path, keep)


def _predict_table(
    meta: dict[str, Any],
    given: Mapping[str, Any],
    tasks: Sequence[Task],
    outputs: Outputs,
    path: Path,
    keep: Sequence[str],
) -> Predictions:
    """Predict for the rows of a table, whose columns may be in any order.

    Args:
        meta: metadata of the data that the model was trained on.
        given: the options of that table.
        tasks: its targets.
        outputs: returns (B, outputs) of each task for encoded rows.
        path: the table.
        keep: columns to copy.
    """
    schema = read_schema(meta)
    options = TableOptions.read(given)
    source = TableSource(find_tables(path), options.encoding, options.separator, options.missing)
    require_columns(source, schema.feature_columns, source.columns, ", which the model was trained with")
    require_columns(source, keep, source.columns, " to keep")
    encoder = Encoder(schema)
    parts = [
        _with_columns(batch, keep, _as_columns(tasks, outputs(encoder.features(batch, False))))
        for batch in source.batches(list(dict.fromkeys([*schema.feature_columns, *keep])))
    ]
    if not parts:
        raise DataError(f"{source} has no rows; at least one is needed.")
    encoder.require_numbers(source)
    targets = {target.column for target in schema.targets}
    ignored = [name for name in source.columns if name not in {*keep, *schema.feature_columns}]
    described = ", ".join(f"{name} (a target)" if name in targets else name for name in ignored)
    lines = [f"columns that the model does not use: {described}"] if ignored else []
    for counts, meaning in (
        (encoder.unknown, "values were never seen in training"),
        (encoder.not_numbers, "texts are not numbers and count as missing"),
    ):
        lines += [f"{name}: {count:,} {meaning}" for name, count in counts.items()]
    summary = {"ignored": ignored, "unknown": encoder.unknown, "not_numbers": encoder.not_numbers}
    return Predictions(pd.concat(parts, ignore_index=True), summary, lines, source.notes)


def _with_columns(batch: pa.RecordBatch, keep: Sequence[str], predictions: pd.DataFrame) -> pd.DataFrame:
    taken = next((name for name in keep if name in predictions), None)
    if taken is not None:
        raise DataError(f"column {taken} cannot be kept: a prediction has that name.")
    return pd.concat([batch.select(list(keep)).to_pandas(), predictions], axis=1) if keep else predictions


def _as_columns(tasks: Sequence[Task], outputs: Sequence[Tensor]) -> pd.DataFrame:
    """One column per task, and for a multiclass one also the probability of each class."""
    columns: dict[str, object] = {}
    for task, values in zip(tasks, _predict_tasks(tasks, outputs), strict=True):
        if task.kind == "multiclass":
            columns[task.name] = np.array(task.classes, dtype=object)[values.argmax(1)]
            columns |= {f"{task.name}.{name}": values[:, index] for index, name in enumerate(task.classes)}
        else:
            columns[task.name] = values
    return pd.DataFrame(columns)


def _predict_tasks(tasks: Iterable[Task], outputs: Iterable[Tensor]) -> Iterator[npt.NDArray[np.float32]]:
    return (task.predict(output).float().numpy() for task, output in zip(tasks, outputs, strict=True))


def _run_batches(run: LoadedRun, count: int, forward: Callable[[slice], Any]) -> list[Tensor]:
    """The outputs of each task for ``count`` rows; ``forward`` runs the model on a slice of them."""
    outputs: list[list[Tensor]] = []
    for start in range(0, count, EVALUATION_BATCH):
        with run.placement.autocast():
            scores, _ = forward(slice(start, start + EVALUATION_BATCH))
        outputs.append([score.float().cpu() for score in scores])
    return [torch.cat(batches) for batches in zip(*outputs, strict=True)]
