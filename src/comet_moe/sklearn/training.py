"""The parameters of an estimator as a configuration, its network, and the training in memory."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from comet_moe.devices import Placement, make_placement
from comet_moe.exceptions import DivergedError, RecipeError, RoutingWarning
from comet_moe.experiments.config.loader import read_recipe
from comet_moe.experiments.config.schema import TrainConfig, rows_per_step
from comet_moe.experiments.data import Split
from comet_moe.experiments.data.table.schema import TableSchema
from comet_moe.experiments.models import Model
from comet_moe.experiments.models.build import build_model
from comet_moe.experiments.training.distributed import num_threads
from comet_moe.experiments.training.evaluate import evaluate, routing_warnings
from comet_moe.experiments.training.gain import measure_gain
from comet_moe.experiments.training.recipe import make_trainer
from comet_moe.experiments.training.records import ChangeRecord, EpochRecord, EvaluationRecord, GainRecord
from comet_moe.gates.registry import gate_names, is_gate_name

_MODEL = ("experts", "units", "head", "dropout", "input_dropout", "embedding", "numeric", "numeric_embedding")
_TRAINING = ("epochs", "patience", "learning_rate", "device", "precision")
ADVICE = "lower learning_rate, or check X and y for extreme values"


def choose_batch_size(batch_size: Any, rows: int) -> Any:
    """``batch_size``, or for "auto" that of about 32 steps per epoch, from 32 to 1024 rows."""
    if isinstance(batch_size, str) and batch_size == "auto":
        return rows_per_step(rows, None)
    return plain(batch_size)


def make_config(
    name: str, params: Mapping[str, Any], *, seed: int, batch_size: int, weights: Mapping[str, float] | None
) -> TrainConfig:
    """The configuration of a network and its training; ValueError names a parameter that is wrong.

    ``name`` and ``params`` are those of the estimator; ``weights`` of tasks may be None.
    """
    values = {key: plain(value) for key, value in params.items()}
    gate = values["gate"]
    if not is_gate_name(gate):
        raise ValueError(f"gate is {gate!r}: choose one of {', '.join(gate_names())}")
    fields = TrainConfig.gate_section(gate).model_fields
    settings = {key: values[key] for key in fields if key in values} | _own_settings(gate, values, fields)
    recipe = read_recipe("table")
    if "information" in settings and settings["information"] is None:
        settings["information"] = recipe["gates"].get(gate.removesuffix("+"), {}).get("information", 0.0)
    try:
        return TrainConfig.model_validate(
            {
                "recipe": name,
                "seed": seed,
                "data": {"name": "table"},
                "model": {"kind": "table"} | {key: values[key] for key in _MODEL},
                "gate": settings | {"name": gate},
                "search": {"epochs": values["search_epochs"]},
                "loss": {"weights": dict(weights or {})},
                "training": {key: values[key] for key in _TRAINING}
                | {"batch_size": batch_size, "threads": values["n_threads"]}
                | {"gate_lr_factor": recipe["training"]["gate_lr_factor"]},
            }
        )
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        places = [str(part) for part in problem["loc"]]
        names = {"search.epochs": "search_epochs", "training.threads": "n_threads"}
        setting = names.get(
            ".".join(places[:2]), next((p for p in reversed(places) if p in values), ".".join(places))
        )
        reason = problem["msg"].removeprefix("Value error, ")
        given = values[setting] if setting in values else problem["input"]
        message = f"{setting} is {given!r}: {reason[0].lower()}{reason[1:]}"
        if not places:  # of several settings together, which it names
            message = reason.removeprefix("gate.")
        raise ValueError(message) from error


def _own_settings(gate: str, values: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """The parameter ``gate_settings``; ValueError for one that the gate does not have."""
    given = values["gate_settings"] or {}
    unknown = next((key for key in given if key not in known or key == "name"), None)
    if unknown is not None:
        has = ", ".join(key for key in known if key != "name")
        raise ValueError(f"gate_settings has {unknown!r}: choose some of {has}, the settings of {gate}")
    return dict(given)


def plain(value: Any) -> Any:
    """``value`` without types of numpy, in lists and mappings as well; such are what a grid search gives."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


def build_network(config: TrainConfig, schema: TableSchema, rows: int) -> Model:
    """The network of ``config`` for the table of ``schema`` with so many train rows."""
    meta = {"name": "X", "table": schema.model_dump(mode="json"), "rows": {"train": rows}}
    try:
        return build_model(config, meta)
    except RecipeError as error:
        raise ValueError(str(error.__cause__ or error)) from error


def train(
    model: Model, train_rows: Split, validation: Split | None, config: TrainConfig
) -> tuple[list[dict[str, Any]], EvaluationRecord, dict[str, Any] | None, dict[str, Any]]:
    """Train ``model`` in place, up to the last epoch or until the validation loss no longer falls.

    With validation rows the model ends with the weights of the best epoch, else with the last ones. The
    random numbers of an epoch depend on the seed and the epoch alone; torch's own generator stays as it is.

    Returns:
        ``history_`` of the estimators, an evaluation, the routing gain, and what ``result_`` has about the
        training. The evaluation and the gain are on the validation rows, or else on the train rows.
    """
    started = time.perf_counter()
    placement = make_placement(config.training.device, config.training.precision, source="")
    trainer = make_trainer(model.to(placement.device), config, train_rows, validation, placement)
    with torch.random.fork_rng(devices=[]):
        ended = trainer.run()
    if ended.status == "failed":
        raise DivergedError(f"{ended.reason}: {ADVICE}")
    evaluation = trainer.history[trainer.state.best_epoch - 1].validation
    if validation is None:
        with num_threads(config.training.threads):
            evaluation = evaluate(model, train_rows, placement=placement)
    if evaluation.loss is None or not math.isfinite(evaluation.loss):
        raise DivergedError(f"the loss after training is {evaluation.loss}: {ADVICE}")
    notes = list(routing_warnings(evaluation.routing, trainer.state.best_epoch))
    for note in notes:
        warnings.warn(note, RoutingWarning, stacklevel=4)  # where fit is called
    model.cpu().eval()
    with num_threads(config.training.threads):
        gain = measure_gain(model, train_rows if validation is None else validation, Placement(), groups={})
    result = {
        "epochs": len(trainer.history),
        "best_epoch": trainer.state.best_epoch,
        "loss": evaluation.loss / 100,
        "tasks": evaluation.tasks,
        "experts_per_sample": evaluation.experts_per_sample,
        "flops_per_sample": evaluation.flops_per_sample,
        "seconds": time.perf_counter() - started,
        "notes": notes,
    }
    history = [_describe_epoch(record) for record in trainer.history]
    return history, evaluation, None if gain is None else _describe_gain(gain), result


def _describe_gain(gain: GainRecord) -> dict[str, Any]:
    """``routing_gain_``, with losses as they are, not times 100."""
    return {
        **_describe_change(gain, 100),
        "mean_routes": None if gain.mean_routes is None else _describe_change(gain.mean_routes, 100),
        "by_gate": {name: _describe_change(change, 100) for name, change in gain.by_gate.items()},
        "by_group": {
            column: {label: _describe_change(change, 100) for label, change in groups.items()}
            for column, groups in gain.by_group.items()
        },
        "metrics": {
            task: {name: _describe_change(change, 1) for name, change in changes.items()}
            for task, changes in gain.metrics.items()
        },
    }


def _describe_change(change: ChangeRecord, unit: int) -> dict[str, Any]:
    ends = change.interval or (None, None)
    gain, low, high = (None if value is None else value / unit for value in (change.gain, *ends))
    return {"gain": gain, "interval": None if low is None or high is None else [low, high]}


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
