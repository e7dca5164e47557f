"""The network of an estimator and its training loop: in memory, without the folder of a run."""

from __future__ import annotations

import math
import time
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from comet_moe.checks import without_value_checks
from comet_moe.config.schema import TrainConfig
from comet_moe.data import Split
from comet_moe.data.table_schema import TableSchema
from comet_moe.exceptions import DivergedError, RecipeError
from comet_moe.local_search import parameter_groups
from comet_moe.models import TableModel
from comet_moe.stepping import step as step_modules
from comet_moe.training.batches import training_batches
from comet_moe.training.build import ADAM_EPSILON, MultiTaskObjective, build_model
from comet_moe.training.distributed import Processes, num_threads
from comet_moe.training.evaluate import evaluate
from comet_moe.training.records import EvaluationRecord


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
    optimizer = torch.optim.Adam(
        parameter_groups(model, training.learning_rate), eps=ADAM_EPSILON, fused=True
    )
    objective = MultiTaskObjective(model, Processes())
    history: list[dict[str, Any]] = []
    best: EvaluationRecord | None = None
    best_epoch, best_loss, best_weights = 0, math.inf, {}
    with num_threads(training.threads), torch.random.fork_rng(devices=[]):
        for epoch in range(1, training.epochs + 1):
            torch.manual_seed(zlib.crc32(f"{config.seed}/{epoch}".encode()))
            record: dict[str, Any] = {"epoch": epoch}
            record |= _train_epoch(model, objective, optimizer, train_rows, config, epoch)
            if validation is None:
                best_epoch = epoch
            else:
                evaluation = evaluate(model, validation)
                loss = _check_loss(evaluation.loss, f"the validation loss of epoch {epoch}")
                record |= {"validation_loss": loss / 100, "validation": evaluation.tasks}
                if loss < best_loss:
                    best_epoch, best_loss, best = epoch, loss, evaluation
                    best_weights = {name: value.clone() for name, value in model.state_dict().items()}
            history.append(record | {"seconds": time.perf_counter() - started})
            if epoch - best_epoch >= training.patience:
                break
        if best is None:
            best = evaluate(model, train_rows)
            _check_loss(best.loss, "the loss after training")
        else:
            model.load_state_dict(best_weights)
    model.eval()
    return Trained(history, best_epoch, best, time.perf_counter() - started)


@without_value_checks()  # a NaN loss ends training with a reason
def _train_epoch(
    model: TableModel,
    objective: MultiTaskObjective,
    optimizer: torch.optim.Optimizer,
    rows: Split,
    config: TrainConfig,
    epoch: int,
) -> dict[str, float]:
    model.train()
    loss, aux_loss, steps = 0.0, 0.0, 0
    for batch in training_batches(rows, config.training.batch_size, config.seed, epoch):
        optimizer.zero_grad(set_to_none=True)
        losses = objective(batch)
        losses.total.backward()
        optimizer.step()
        step_modules(model)
        loss += _check_loss(float(losses.loss.detach()), f"the train loss of epoch {epoch}")
        aux_loss += float(losses.aux_loss.detach())
        steps += 1
    return {"train_loss": loss / steps, "train_aux_loss": aux_loss / steps}


def _check_loss(loss: float | None, name: str) -> float:
    if loss is None or not math.isfinite(loss):
        raise DivergedError(f"{name} is {loss}: lower learning_rate, or check X and y for extreme values")
    return loss
