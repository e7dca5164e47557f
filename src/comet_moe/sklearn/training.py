"""The network of an estimator and its training loop: in memory, without the folder of a run."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comet_moe.checks import without_value_checks
from comet_moe.devices import Placement, make_placement
from comet_moe.exceptions import DivergedError, RecipeError
from comet_moe.experiments.config.schema import TrainConfig
from comet_moe.experiments.data import Split
from comet_moe.experiments.data.table.schema import TableSchema
from comet_moe.experiments.models import TableModel
from comet_moe.experiments.training.batches import Batch, prefetched, training_batches
from comet_moe.experiments.training.build import ADAM_EPSILON, MultiTaskObjective, build_model
from comet_moe.experiments.training.distributed import Processes, num_threads
from comet_moe.experiments.training.evaluate import evaluate
from comet_moe.experiments.training.records import EvaluationRecord
from comet_moe.experiments.training.trainer import READ_INTERVAL
from comet_moe.local_search import parameter_groups
from comet_moe.stepping import step as step_modules


@dataclass(frozen=True)
class Trained:
    """How a model was trained.

    Attributes:
        history: one dictionary per epoch, see the attribute ``history_`` of the estimators.
        best_epoch: the epoch whose weights the model has, from 1.
        evaluation: the model on the validation rows, or on the train rows where there are none.
        seconds: duration.
    """

    history: list[dict[str, Any]]
    best_epoch: int
    evaluation: EvaluationRecord
    seconds: float


def build_network(config: TrainConfig, schema: TableSchema, rows: int) -> TableModel:
    """The network of ``config`` for the table of ``schema`` with so many train rows."""
    meta = {"name": "X", "table": schema.model_dump(mode="json"), "rows": {"train": rows}}
    try:
        model = build_model(config, meta)
    except RecipeError as error:
        raise ValueError(str(error.__cause__ or error)) from error
    assert isinstance(model, TableModel)
    return model


def train(model: TableModel, train_rows: Split, validation: Split | None, config: TrainConfig) -> Trained:
    """Train ``model`` in place, up to the last epoch or until the validation loss no longer falls.

    With validation rows the model ends with the weights of the best epoch, else with the last ones. The
    random numbers of an epoch depend on the seed and the epoch alone; torch's own generator stays as it is.
    """
    started = time.perf_counter()
    training = config.training
    placement = make_placement(training.device, training.precision, source="")
    model.to(placement.device)
    optimizer = torch.optim.Adam(
        parameter_groups(model, training.learning_rate), eps=ADAM_EPSILON, fused=True
    )
    objective = MultiTaskObjective(model, Processes())
    scaler = torch.amp.GradScaler(placement.device.type, enabled=placement.precision == "float16")
    history: list[dict[str, Any]] = []
    best: EvaluationRecord | None = None
    best_epoch, best_loss, best_weights = 0, math.inf, {}
    with num_threads(training.threads), torch.random.fork_rng(devices=[]):
        for epoch in range(1, training.epochs + 1):
            torch.manual_seed(zlib.crc32(f"{config.seed}/{epoch}".encode()))
            record: dict[str, Any] = {"epoch": epoch}
            batches = training_batches(train_rows, training.batch_size, config.seed, epoch)
            record |= _train_epoch(objective, optimizer, scaler, prefetched(batches), placement, epoch)
            if validation is None:
                best_epoch = epoch
            else:
                evaluation = evaluate(model, validation, placement=placement)
                loss = _check_loss(evaluation.loss, f"the validation loss of epoch {epoch}")
                record |= {"validation_loss": loss / 100, "validation": evaluation.tasks}
                if loss < best_loss:
                    best_epoch, best_loss, best = epoch, loss, evaluation
                    best_weights = {name: value.clone() for name, value in model.state_dict().items()}
            history.append(record | {"seconds": time.perf_counter() - started})
            if epoch - best_epoch >= training.patience:
                break
        if best is None:
            best = evaluate(model, train_rows, placement=placement)
            _check_loss(best.loss, "the loss after training")
        else:
            model.load_state_dict(best_weights)
    model.cpu().eval()
    return Trained(history, best_epoch, best, time.perf_counter() - started)


@without_value_checks()  # a NaN loss ends training with a reason
def _train_epoch(
    objective: MultiTaskObjective,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batches: Iterable[Batch],
    placement: Placement,
    epoch: int,
) -> dict[str, float]:
    objective.train()
    read: list[tuple[float, float]] = []
    waiting: list[Tensor] = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        with placement.autocast():
            losses = objective(placement.move(batch))
        scaler.scale(losses.total).backward()
        scaler.step(optimizer)
        scaler.update()
        step_modules(objective.model)
        waiting.append(torch.stack((losses.loss, losses.aux_loss)).detach())
        if not placement.is_accelerator or len(waiting) == READ_INTERVAL:
            read, waiting = read + _read_losses(waiting, epoch), []
    if waiting:
        read += _read_losses(waiting, epoch)
    loss, aux_loss = (sum(values) / len(read) for values in zip(*read, strict=True))
    return {"train_loss": loss, "train_aux_loss": aux_loss}


def _read_losses(waiting: list[Tensor], epoch: int) -> list[tuple[float, float]]:
    """Loss and auxiliary loss of some steps as numbers."""
    values = torch.stack(waiting).tolist()
    return [(_check_loss(loss, f"the train loss of epoch {epoch}"), aux_loss) for loss, aux_loss in values]


def _check_loss(loss: float | None, name: str) -> float:
    if loss is None or not math.isfinite(loss):
        raise DivergedError(f"{name} is {loss}: lower learning_rate, or check X and y for extreme values")
    return loss
