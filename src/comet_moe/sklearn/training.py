"""The network of an estimator, and its training in memory."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from comet_moe.devices import make_placement
from comet_moe.exceptions import DivergedError, RecipeError
from comet_moe.experiments.config.schema import TrainConfig
from comet_moe.experiments.data import Split
from comet_moe.experiments.data.table.schema import TableSchema
from comet_moe.experiments.models import Model
from comet_moe.experiments.models.build import build_model
from comet_moe.experiments.training.distributed import num_threads
from comet_moe.experiments.training.evaluate import evaluate
from comet_moe.experiments.training.recipe import make_trainer
from comet_moe.experiments.training.records import EpochRecord, EvaluationRecord

ADVICE = "lower learning_rate, or check X and y for extreme values"


@dataclass(frozen=True)
class Trained:
    """How a model was trained.

    Attributes:
        history: one dictionary per epoch, see the attribute ``history_`` of the estimators.
        best_epoch: the epoch whose weights the model has, from 1.
        evaluation: the model on the validation rows, or on the train rows where there are none.
        loss: its loss.
        notes: sentences about gates that do not route.
        seconds: duration.
    """

    history: list[dict[str, Any]]
    best_epoch: int
    evaluation: EvaluationRecord
    loss: float
    notes: list[str]
    seconds: float


def build_network(config: TrainConfig, schema: TableSchema, rows: int) -> Model:
    """The network of ``config`` for the table of ``schema`` with so many train rows."""
    meta = {"name": "X", "table": schema.model_dump(mode="json"), "rows": {"train": rows}}
    try:
        return build_model(config, meta)
    except RecipeError as error:
        raise ValueError(str(error.__cause__ or error)) from error


def train(model: Model, train_rows: Split, validation: Split | None, config: TrainConfig) -> Trained:
    """Train ``model`` in place, up to the last epoch or until the validation loss no longer falls.

    With validation rows the model ends with the weights of the best epoch, else with the last ones. The
    random numbers of an epoch depend on the seed and the epoch alone; torch's own generator stays as it is.
    """
    started = time.perf_counter()
    placement = make_placement(config.training.device, config.training.precision, source="")
    trainer = make_trainer(model.to(placement.device), config, train_rows, validation, placement)
    with torch.random.fork_rng(devices=[]):
        result = trainer.run()
    if result.status == "failed":
        raise DivergedError(f"{result.reason}: {ADVICE}")
    evaluation = trainer.history[trainer.best_epoch - 1].validation
    if validation is None:
        with num_threads(config.training.threads):
            evaluation = evaluate(model, train_rows, placement=placement)
    if evaluation.loss is None or not math.isfinite(evaluation.loss):
        raise DivergedError(f"the loss after training is {evaluation.loss}: {ADVICE}")
    model.cpu().eval()
    return Trained(
        [_describe_epoch(record) for record in trainer.history],
        trainer.best_epoch,
        evaluation,
        evaluation.loss / 100,
        result.notes,
        time.perf_counter() - started,
    )


def _describe_epoch(record: EpochRecord) -> dict[str, Any]:
    """The entry of an epoch in ``history_``, with losses as they are, not times 100."""
    losses = {
        "train_loss": record.train_loss,
        "train_aux_loss": record.train_aux_loss,
        "validation_loss": record.validation.loss,
    }
    plain = {name: loss / 100 for name, loss in losses.items() if loss is not None}
    metrics = {"validation": record.validation.tasks} if "validation_loss" in plain else {}
    return {"epoch": record.epoch} | plain | metrics | {"seconds": record.seconds}
