"""Fitted estimators as files: weights by safetensors, with all else as JSON in its metadata; no pickle."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from sklearn.utils.validation import check_is_fitted

from comet_moe.exceptions import CometError, RunError
from comet_moe.experiments.config.schema import TrainConfig
from comet_moe.experiments.data.table.schema import TableSchema
from comet_moe.files import as_json, describe, load_tensors, require_same_tensors, write_atomically
from comet_moe.sklearn.training import build_network, plain

KEY = "comet_moe.sklearn"
"""Name of the JSON in the metadata of the file."""

_FITTED = ("n_features_in_", "n_iter_", "history_", "routing_", "routing_gain_", "result_")
_TUPLES = ("units", "head")


def write_estimator(estimator: Any, path: Path) -> None:
    """Write a fitted estimator to ``path``; a file that was there is replaced at the end, or not at all."""
    check_is_fitted(estimator)
    params = plain(estimator.get_params(deep=False))
    if not isinstance(params["random_state"], int):  # None, or a generator, whose state is not kept
        params["random_state"] = None
    names = getattr(estimator, "feature_names_in_", None)
    state = {
        "estimator": type(estimator).__name__,
        "params": params,
        "config": estimator._config.model_dump(mode="json"),
        "schema": estimator._schema.model_dump(mode="json"),
        "columns": estimator._columns,
        "train_rows": estimator._train_rows,
        "feature_names": None if names is None else list(names),
        "classes": _pack_classes(getattr(estimator, "classes_", None)),
        "fitted": {name: getattr(estimator, name) for name in _FITTED},
    }
    weights = copy.deepcopy(estimator.model_).float().state_dict()  # as they were trained
    tensors = {name: value.contiguous() for name, value in weights.items()}
    metadata = {KEY: as_json(state)}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))


def read_estimator(kind: type[Any], path: Path) -> Any:
    """The estimator of class ``kind`` that :func:`write_estimator` wrote to ``path``."""
    try:
        tensors = load_tensors(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or not a safetensors file ({error}): save it again") from error
    if KEY not in metadata:
        raise ValueError(f"{path} has weights but no estimator: load a file that save() has written")
    try:
        state = json.loads(metadata[KEY])
        saved = state["estimator"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} has no readable estimator ({describe(error)}): save it again") from error
    if saved != kind.__name__:
        raise ValueError(f"{path} has a {saved}: use {saved}.load, not {kind.__name__}")
    try:
        return _restore(kind, state, tensors, path)
    except CometError:
        raise
    except Exception as error:  # whatever a changed file does to an estimator
        raise ValueError(
            f"{path} is not what save() has written ({describe(error)}): save it again"
        ) from error


def _restore(kind: type[Any], state: dict[str, Any], tensors: dict[str, Any], path: Path) -> Any:
    params = state["params"]
    estimator = kind(**params | {name: tuple(params[name]) for name in _TUPLES if name in params})
    estimator._config = TrainConfig.model_validate(state["config"])
    estimator._schema = TableSchema.model_validate(state["schema"])
    estimator._columns, estimator._train_rows = state["columns"], state["train_rows"]
    estimator.model_ = build_network(estimator._config, estimator._schema, estimator._train_rows)
    require_same_tensors(estimator.model_.state_dict(), tensors, str(path), RunError)
    estimator.model_.load_state_dict(tensors)
    estimator.model_.double().eval()
    if state["feature_names"] is not None:
        estimator.feature_names_in_ = np.asarray(state["feature_names"], dtype=object)
    if state["classes"] is not None:
        estimator.classes_ = _unpack_classes(state["classes"])
    for name, value in state["fitted"].items():
        setattr(estimator, name, value)
    return estimator


def _pack_classes(classes: Any) -> Any:
    """Arrays of classes with their types, by task where there are several."""
    if classes is None:
        return None
    if isinstance(classes, dict):
        return {"tasks": {name: _pack_classes(values) for name, values in classes.items()}}
    return {"dtype": str(classes.dtype), "values": classes.tolist()}


def _unpack_classes(packed: Any) -> Any:
    if "tasks" in packed:
        return {name: _unpack_classes(values) for name, values in packed["tasks"].items()}
    return np.array(packed["values"], dtype=packed["dtype"])
