"""The parameters of an estimator as the configuration of the ``table`` recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from pydantic import ValidationError

from comet_moe.experiments.config.schema import TrainConfig, rows_per_step
from comet_moe.gates.registry import gate_names

_MODEL = ("experts", "units", "head", "dropout", "input_dropout", "embedding", "numeric", "numeric_embedding")
_TRAINING = ("epochs", "patience", "learning_rate", "device", "precision")


def choose_batch_size(batch_size: Any, rows: int) -> Any:
    """``batch_size``, or for "auto" that of about 32 steps per epoch, from 32 to 1024 rows."""
    if isinstance(batch_size, str) and batch_size == "auto":
        return rows_per_step(rows, None)
    return plain(batch_size)


def make_config(
    name: str, params: Mapping[str, Any], *, seed: int, batch_size: int, weights: Mapping[str, float] | None
) -> TrainConfig:
    """The configuration of a network and its training; ValueError names a parameter that is wrong.

    Args:
        name: of the estimator.
        params: its parameters.
        seed: drawn from its ``random_state``.
        batch_size: rows per optimiser step.
        weights: of the tasks, where they are given.
    """
    values = {key: plain(value) for key, value in params.items()}
    gate = values["gate"]
    if gate not in gate_names():
        raise ValueError(f"gate is {gate!r}: choose one of {', '.join(gate_names())}")
    fields = TrainConfig.gate_section(gate).model_fields
    settings = {key: values[key] for key in fields if key in values} | _own_settings(gate, values, fields)
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
                | {"batch_size": batch_size, "threads": values["n_threads"]},
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
