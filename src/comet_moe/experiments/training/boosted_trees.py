"""Boosted trees on a prepared table, with the rows and metrics of the networks: the usual baseline.

scikit-learn's HistGradientBoosting, one model per task. Categorical features with at most 255 codes are
categorical there too; those with more are read as numbers. The most frequent elements of a list are separate
features, and so are the most frequent terms of a text. The trees stop when the loss on the validation split
no longer falls. They are saved by skops, which opens a file without running what is in it.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comet_moe.exceptions import StudyError
from comet_moe.experiments.config import TrainConfig
from comet_moe.experiments.config.schema import LossConfig
from comet_moe.experiments.data import Dataset, Split
from comet_moe.experiments.data.table.schema import TableSchema
from comet_moe.experiments.data.table.text import count_dense, dense_terms
from comet_moe.experiments.models import Task
from comet_moe.experiments.models.base import read_schema, table_tasks
from comet_moe.experiments.training.batches import take_rows
from comet_moe.experiments.training.metrics import TaskMetrics
from comet_moe.experiments.training.records import TREES, TREES_RESULT, ResultRecord
from comet_moe.experiments.training.run import data_meta
from comet_moe.files import describe, write_atomically

MAX_CATEGORIES = 255
MAX_ROUNDS = 500
LIST_ELEMENTS = 30
TEXT_TERMS = 300
_SMALLEST_PROBABILITY = 1e-7

_TYPES = {
    "functools.partial",
    "sklearn._loss.link.Interval",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.utils.validation.check_array",
}
"""What a file of trees may hold beyond the types that skops trusts by itself."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class BoostedTrees:
    """One fitted model per task, and what is needed to predict new rows of the table.

    Attributes:
        meta: metadata of the data set, as a run has it in ``data.json``.
        options: the options of the table.
        loss: the settings of the loss, which the tasks are made of.
        models: those of scikit-learn, in the order of ``tasks``.
    """

    meta: dict[str, Any]
    options: dict[str, Any]
    loss: LossConfig
    models: Sequence[Any]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The targets of the table."""
        return tuple(table_tasks(read_schema(self.meta), self.loss))

    def outputs(self, features: Mapping[str, Array]) -> list[Tensor]:
        """(B, outputs) of each task for encoded rows, in the form of the output of a network's head."""
        inputs = _inputs(features, read_schema(self.meta))
        return [_as_output(task, model, inputs) for task, model in zip(self.tasks, self.models, strict=True)]

    def save(self, path: Path) -> None:
        """Write ``path`` atomically."""
        import skops.io

        content = {
            "models": list(self.models),
            "data": json.dumps({"meta": self.meta, "options": self.options, "loss": self.loss.model_dump()}),
        }
        write_atomically(path, lambda file: skops.io.dump(content, file, compression=ZIP_DEFLATED))

    @classmethod
    def load(cls, path: Path) -> "BoostedTrees":
        """Read what :meth:`save` has written; a file with anything else in it raises StudyError."""
        import skops.io

        try:
            unknown = set(skops.io.get_untrusted_types(file=path)) - _TYPES
            if unknown:
                raise ValueError(f"it holds {', '.join(sorted(unknown))}")
            content = skops.io.load(path, trusted=sorted(_TYPES))
            data = json.loads(content["data"])
            trees = cls(data["meta"], data["options"], LossConfig(**data["loss"]), content["models"])
            width = len(_categorical_columns(read_schema(trees.meta)))
            if not all(_is_sound(model, width) for model in trees.models) or len(trees.models) != len(
                trees.tasks
            ):
                raise ValueError("its trees do not fit the table")
        except Exception as error:  # whatever a damaged archive does to skops
            raise StudyError(
                f"{path} is damaged or not a file of boosted trees ({describe(error)}): delete it and "
                f"{TREES_RESULT}, and resume the comparison"
            ) from error
        return trees


def train_trees(dataset: Dataset, config: TrainConfig) -> tuple[BoostedTrees, ResultRecord]:
    """Fit one model per task on the train split; returns them, with losses and metrics as those of a run.

    With a validation split the fit has no random part, so that there is one fit and not one per seed.
    """
    started = time.perf_counter()
    schema = read_schema(dataset.meta)
    tasks = table_tasks(schema, config.loss)
    splits: dict[str, Split] = {name: getattr(dataset, name) for name in ("train", "validation", "test")}
    inputs = {name: _inputs(split.features, schema) for name, split in splits.items()}
    is_categorical = _categorical_columns(schema)
    losses = {"validation": 0.0, "test": 0.0}
    metrics, models = {}, []
    for task in tasks:
        models.append(_fit(task, dataset, inputs, is_categorical))
        for name in losses:
            found = TaskMetrics(task)
            rows = take_rows(splits[name], slice(0, len(splits[name])))
            found.add(_as_output(task, models[-1], inputs[name]), rows)
            losses[name] += 100 * task.weight * found.loss()
            if name == "test":
                metrics[task.name] = found.metrics()
    record = ResultRecord(
        status="complete",
        recipe=dataset.name,
        gate=TREES,
        seed=0,
        validation_loss=losses["validation"],
        test_loss=losses["test"],
        tasks=metrics,
        seconds=time.perf_counter() - started,
    )
    return BoostedTrees(data_meta(dataset), config.data.options, config.loss, models), record


def _fit(task: Task, dataset: Dataset, inputs: dict[str, Array], is_categorical: Array) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    targets = {name: np.array(getattr(dataset, name).targets[task.name]) for name in ("train", "validation")}
    present = {name: ~np.isnan(target) for name, target in targets.items()}
    rows, held_out = present["train"], present["validation"]
    settings = {"categorical_features": is_categorical, "max_iter": MAX_ROUNDS, "random_state": 0}
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


def _inputs(features: Mapping[str, Array], schema: TableSchema) -> Array:
    """(N, columns) float64: codes, numbers, frequent elements of lists, weights of the frequent terms."""
    parts = [np.asarray(features[name], float) for name in ("categorical", "numeric") if name in features]
    first = 0
    for feature in schema.of_kind("list"):
        codes = np.asarray(features["lists"])[:, first : first + feature.length]
        first += feature.length
        frequent = range(min(feature.num_codes, LIST_ELEMENTS))
        parts.append(np.stack([(codes == code).any(1) for code in frequent], 1).astype(float))
    if "texts" in features:
        parts.append(dense_terms(schema, features["texts"], TEXT_TERMS))
    return np.concatenate(parts, 1)


def _categorical_columns(schema: TableSchema) -> Array:
    """(columns,) bool: which columns of the inputs scikit-learn reads as categories."""
    few = [feature.num_codes <= MAX_CATEGORIES for feature in schema.of_kind("categorical")]
    numbers = len(schema.of_kind("numeric"))
    elements = sum(min(feature.num_codes, LIST_ELEMENTS) for feature in schema.of_kind("list"))
    terms = sum(count_dense(feature, TEXT_TERMS) for feature in schema.of_kind("text"))
    return np.array(few + [False] * (numbers + elements + terms))


def _is_sound(model: Any, columns: int) -> bool:
    """Whether every node of the trees names nodes, columns and categories that exist.

    scikit-learn's compiled prediction does not check them.
    """
    for predictor in (tree for trees in model._predictors for tree in trees):
        nodes = predictor.nodes
        inner = nodes[nodes["is_leaf"] == 0]
        children = np.stack([inner["left"], inner["right"]])
        categories = inner["bitset_idx"][inner["is_categorical"] == 1]
        is_sound = (
            len(nodes) > 0
            and (children < len(nodes)).all()
            and (children > np.flatnonzero(nodes["is_leaf"] == 0)).all()  # so that no walk is endless
            and (inner["feature_idx"] >= 0).all()
            and (inner["feature_idx"] < columns).all()
            and (categories < len(predictor.raw_left_cat_bitsets)).all()
        )
        if not is_sound:
            return False
    return bool(model.n_features_in_ == columns)
