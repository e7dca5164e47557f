"""Boosted trees on a prepared table, with the rows and metrics of the networks: the usual baseline.

scikit-learn's HistGradientBoosting, one model per task. Categorical features with at most 255 codes are
categorical there too; those with more are read as numbers. The most frequent elements of a list are separate
features. The trees stop when the loss on the validation split no longer falls.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from comet_moe.experiments.data import Dataset, Split
from comet_moe.experiments.data.table.schema import TableSchema
from comet_moe.experiments.models import Task
from comet_moe.experiments.models.base import read_schema
from comet_moe.experiments.training.batches import take_rows
from comet_moe.experiments.training.metrics import TaskMetrics
from comet_moe.experiments.training.records import TREES, ResultRecord

FILE = "trees.jsonl"
"""Their results in the folder of a study, one line per seed."""

MAX_CATEGORIES = 255
MAX_ROUNDS = 500
LIST_ELEMENTS = 30
_SMALLEST_PROBABILITY = 1e-7

Array = npt.NDArray[Any]


def train_trees(dataset: Dataset, tasks: Sequence[Task], seed: int) -> ResultRecord:
    """Fit one model per task on the train split; returns losses and metrics as those of a run."""
    started = time.perf_counter()
    schema = read_schema(dataset.meta)
    inputs = {name: _features(getattr(dataset, name), schema) for name in ("train", "validation", "test")}
    is_categorical = _categorical_columns(schema, inputs["train"].shape[1])
    losses = {"validation": 0.0, "test": 0.0}
    metrics = {}
    for task in tasks:
        model = _fit(task, dataset, inputs, is_categorical, seed)
        for name in losses:
            split: Split = getattr(dataset, name)
            found = TaskMetrics(task)
            found.add(_as_output(task, model, inputs[name]), take_rows(split, slice(0, len(split))))
            losses[name] += 100 * task.weight * found.loss()
            if name == "test":
                metrics[task.name] = found.metrics()
    return ResultRecord(
        status="complete",
        recipe=dataset.name,
        gate=TREES,
        seed=seed,
        validation_loss=losses["validation"],
        test_loss=losses["test"],
        tasks=metrics,
        seconds=time.perf_counter() - started,
    )


def _fit(task: Task, dataset: Dataset, inputs: dict[str, Array], is_categorical: Array, seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    targets = {name: np.array(getattr(dataset, name).targets[task.name]) for name in ("train", "validation")}
    present = {name: ~np.isnan(target) for name, target in targets.items()}
    rows, held_out = present["train"], present["validation"]
    settings = {"categorical_features": is_categorical, "max_iter": MAX_ROUNDS, "random_state": seed}
    if task.kind in ("binary", "multiclass"):
        model = HistGradientBoostingClassifier(**settings)
        # A class that no train row has cannot be scored.
        held_out &= np.isin(targets["validation"], targets["train"][rows])
    else:
        loss = "poisson" if task.kind == "count" else "squared_error"
        model = HistGradientBoostingRegressor(loss=loss, **settings)
    validation = {"X_val": inputs["validation"][held_out], "y_val": targets["validation"][held_out]}
    model.set_params(early_stopping=bool(held_out.any()))
    return model.fit(inputs["train"][rows], targets["train"][rows], **(validation if held_out.any() else {}))


def _as_output(task: Task, model: Any, inputs: Array) -> torch.Tensor:
    """Predictions in the form of a head's output: logits, standardised numbers, or logarithms of counts."""
    if task.kind in ("binary", "multiclass"):
        probability = np.full((len(inputs), max(2, task.outputs)), 0.0)
        probability[:, model.classes_.astype(int)] = model.predict_proba(inputs)
        logits = np.log(np.clip(probability, _SMALLEST_PROBABILITY, 1.0))
        output = logits if task.kind == "multiclass" else logits[:, 1:] - logits[:, :1]
    else:
        output = model.predict(inputs)[:, None]
        if task.kind == "count":
            output = np.log(np.maximum(output, _SMALLEST_PROBABILITY))
    return torch.from_numpy(output)


def _features(split: Split, schema: TableSchema) -> Array:
    """(N, columns) float64: codes, numbers, and for each list which of its frequent elements it has."""
    names = [name for name in ("categorical", "numeric") if name in split.features]
    parts = [np.asarray(split.features[name], float) for name in names]
    first = 0
    for feature in schema.of_kind("list"):
        codes = np.asarray(split.features["lists"])[:, first : first + feature.length]
        first += feature.length
        frequent = range(min(feature.num_codes, LIST_ELEMENTS))
        parts.append(np.stack([(codes == code).any(1) for code in frequent], 1).astype(float))
    return np.concatenate(parts, 1)


def _categorical_columns(schema: TableSchema, columns: int) -> Array:
    """(columns,) bool: which columns of the features scikit-learn reads as categories."""
    few = [feature.num_codes <= MAX_CATEGORIES for feature in schema.of_kind("categorical")]
    return np.array(few + [False] * (columns - len(few)))
