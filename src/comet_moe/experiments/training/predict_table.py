"""Predictions of a model that was trained on a table, for the rows of a new table."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from torch import Tensor

from comet_moe.devices import Placement
from comet_moe.exceptions import DataError, RunError
from comet_moe.experiments.data.table.encode import Encoder
from comet_moe.experiments.data.table.schema import TableOptions
from comet_moe.experiments.data.table.source import TableSource, find_tables
from comet_moe.experiments.models import TableModel, Task
from comet_moe.experiments.training.distributed import num_threads
from comet_moe.experiments.training.evaluate import EVALUATION_BATCH
from comet_moe.experiments.training.load import LoadedRun
from comet_moe.experiments.training.table_parts import read_schema


@dataclass(frozen=True)
class TablePredictions:
    """Predictions for a table, and what of the table was not as in training.

    Attributes:
        frame: one row per row of the table, in its order. A binary task has the probability of its second
            class, a multiclass task the likeliest class and, as TASK.CLASS, the probability of each; the
            others have numbers in the units of the training data.
        ignored: columns of the table that the model does not use.
        unknown: values of categories that were never seen in training, by feature.
        not_numbers: texts in numeric columns, which count as missing, by feature.
        notes: what was guessed of the file.
    """

    frame: pd.DataFrame
    ignored: list[str]
    unknown: dict[str, int]
    not_numbers: dict[str, int]
    notes: list[str]


def predict_table(run: LoadedRun, path: Path, keep: Sequence[str] = ()) -> TablePredictions:
    """Predict all tasks for the rows of ``path``: a table, a folder of tables or a pattern.

    Its columns may be in any order. DataError names a column that is missing.

    Args:
        run: a run on a table.
        path: the new table.
        keep: columns of it that come before the predictions, such as an id.
    """
    if not isinstance(run.model, TableModel):
        raise RunError(f"{run.folder.path} is not a run on a table: give one of the recipe table")
    schema = read_schema(run.meta)
    options = TableOptions.read(run.config.data.options)
    source = TableSource(find_tables(path), options.encoding, options.separator, options.missing)
    missing = [name for name in schema.feature_columns if name not in source.columns]
    if missing:
        raise DataError(
            f"{source} has no column {', '.join(missing)}, which the run was trained with; its columns are "
            f"{', '.join(source.columns)}."
        )
    absent = next((name for name in keep if name not in source.columns), None)
    if absent is not None:
        raise DataError(
            f"{source} has no column {absent} to keep; its columns are {', '.join(source.columns)}."
        )
    encoder = Encoder(schema)
    with num_threads(run.config.training.threads):
        parts = [
            _with_columns(batch, keep, _predict_batch(run.model, encoder, batch, run.placement))
            for batch in source.batches(list(dict.fromkeys([*schema.feature_columns, *keep])))
        ]
    if not parts:
        raise DataError(f"{source} has no rows; at least one is needed.")
    used = {*keep, *schema.feature_columns, *(target.column for target in schema.targets)}
    return TablePredictions(
        frame=pd.concat(parts, ignore_index=True),
        ignored=[name for name in source.columns if name not in used],
        unknown=encoder.unknown,
        not_numbers=encoder.not_numbers,
        notes=source.notes,
    )


def _with_columns(batch: pa.RecordBatch, keep: Sequence[str], predictions: pd.DataFrame) -> pd.DataFrame:
    taken = next((name for name in keep if name in predictions), None)
    if taken is not None:
        raise DataError(f"column {taken} cannot be kept: a prediction has that name.")
    return pd.concat([batch.select(list(keep)).to_pandas(), predictions], axis=1) if keep else predictions


@torch.no_grad()
def _predict_batch(
    model: TableModel, encoder: Encoder, batch: pa.RecordBatch, placement: Placement
) -> pd.DataFrame:
    arrays = {name: torch.from_numpy(array) for name, array in encoder.features(batch, False).items()}
    outputs: list[list[Tensor]] = []
    for start in range(0, batch.num_rows, EVALUATION_BATCH):
        rows = slice(start, start + EVALUATION_BATCH)
        features = {name: array[rows].clone() for name, array in arrays.items()}
        with placement.autocast():
            scores, _ = model(placement.move(features))
        outputs.append([score.float().cpu() for score in scores])
    by_task = (torch.cat(batches) for batches in zip(*outputs, strict=True))
    columns: dict[str, object] = {}
    for task, output in zip(model.tasks, by_task, strict=True):
        columns |= _columns(task, output)
    return pd.DataFrame(columns)


def _columns(task: Task, output: Tensor) -> dict[str, object]:
    predicted = task.predict(output).numpy()
    if task.kind != "multiclass":
        return {task.name: predicted}
    likeliest = np.array(task.classes, dtype=object)[predicted.argmax(1)]
    return {task.name: likeliest} | {
        f"{task.name}.{name}": predicted[:, index] for index, name in enumerate(task.classes)
    }
