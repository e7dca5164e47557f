"""A run folder as the audit takes it: batches of a table or of the run's own data, and its losses."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from comet_moe.devices import Placement
from comet_moe.exceptions import DataError, RunError
from comet_moe.experiments.data.raw_files import require_columns
from comet_moe.experiments.data.table.encode import Encoder
from comet_moe.experiments.data.table.schema import TableOptions
from comet_moe.experiments.data.table.source import TableSource, find_tables
from comet_moe.experiments.models import Model
from comet_moe.experiments.models.base import read_schema
from comet_moe.experiments.training.batches import Batch, evaluation_batches, load_dataset
from comet_moe.experiments.training.distributed import Processes
from comet_moe.experiments.training.recipe import LoadedRun, MultiTaskObjective
from comet_moe.experiments.training.trainer import StepLoss


def audit_batches(run: LoadedRun, table: Path | None, batches: int, batch_size: int) -> list[Batch]:
    """The first rows of ``table``, by default of the test split of the run's own data.

    Args:
        run: a finished run.
        table: with the columns of the table that the run was trained on, targets included.
        batches, batch_size: how many rows at most.
    """
    if table is not None:
        return list(islice(_table_batches(run, table, batch_size), batches))
    dataset = load_dataset(run.config)
    return list(islice(evaluation_batches(dataset.test, batch_size), batches))


def _table_batches(run: LoadedRun, path: Path, batch_size: int) -> Iterator[Batch]:
    if run.config.data.name != "table":
        raise RunError(
            f"{run.folder.path} was trained on {run.config.data.name}, not on a table: leave --data out, and "
            "its own data is used"
        )
    schema = read_schema(run.meta)
    options = TableOptions.read(run.config.data.options)
    source = TableSource(find_tables(path), options.encoding, options.separator, options.missing)
    columns = dict.fromkeys([*schema.feature_columns, *(target.column for target in schema.targets)])
    require_columns(source, list(columns), source.columns, ", which the run was trained with")
    encoder, found = Encoder(schema), False
    for batch in source.batches(list(columns)):
        features, targets = encoder.features(batch, False), encoder.targets(batch)
        for start in range(0, batch.num_rows, batch_size):
            rows = slice(start, start + batch_size)
            found = True
            yield Batch(
                {name: torch.from_numpy(array[rows].copy()) for name, array in features.items()},
                {name: torch.from_numpy(array[rows].copy()) for name, array in targets.items()},
            )
    if not found:
        raise DataError(f"{source} has no rows; at least one is needed.")


def audit_loss(model: Model, batch: Batch) -> Tensor:
    """(B,) the losses of the rows over all tasks, whose mean is the loss of the batch in training."""
    batch = _on_device(model, batch)
    outputs, _ = model(batch.features)
    by_task = [
        task.mean_row_losses(output.float(), batch.targets)
        for task, output in zip(model.tasks, outputs, strict=True)
    ]
    return model.weigh(by_task)


def audit_total(model: Model, batch: Batch) -> Tensor:
    """What training minimises on a batch, by the objective of the trainer."""
    losses: StepLoss = MultiTaskObjective(model, Processes())(_on_device(model, batch))
    return losses.total


def _on_device(model: Model, batch: Batch) -> Batch:
    return Placement(next(model.parameters()).device).move(batch)
