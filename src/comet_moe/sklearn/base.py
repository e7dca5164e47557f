"""What the estimators share: from X and encoded targets to a trained network, and back to predictions."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from sklearn.base import BaseEstimator
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_consistent_length, check_is_fitted
from torch import Tensor

from comet_moe.experiments.data import Split
from comet_moe.experiments.data.table.encode import Encoder
from comet_moe.experiments.data.table.schema import TableSchema
from comet_moe.experiments.export import Check, export_model
from comet_moe.experiments.training.batches import evaluation_batches
from comet_moe.experiments.training.distributed import num_threads
from comet_moe.experiments.training.evaluate import EVALUATION_BATCH
from comet_moe.sklearn.files import read_estimator, write_estimator
from comet_moe.sklearn.inputs import (
    Column,
    Floats,
    check_targets,
    choose_columns,
    encode_target,
    fit_features,
    fit_target,
    merge_rows,
    read_table,
)
from comet_moe.sklearn.training import build_network, choose_batch_size, make_config, train

SAMPLE_WEIGHT = "sample weight"
"""Name of the array of weights among the targets of a batch."""


@dataclass(eq=False, repr=False, kw_only=True)
class BaseMoE(BaseEstimator):
    """Base class of the estimators. Subclasses encode targets and decode predictions, and have a ``gate``."""

    experts: int = 8
    k: int = 2
    units: Sequence[int] = (64,)
    head: Sequence[int] = (32,)
    embedding: int = 8
    numeric: str = "piecewise"
    numeric_embedding: int = 16
    dropout: float = 0.0
    input_dropout: float = 0.0
    gamma: float = 1.0
    entropy: float = 0.01
    load_balance: float | None = None
    information: float | None = None
    warmup_epochs: int = 0
    gate_settings: Mapping[str, Any] | None = None
    search_epochs: int = 3
    epochs: int = 100
    batch_size: int | str = "auto"
    learning_rate: float = 2e-3
    validation_fraction: float = 0.1
    patience: int = 10
    columns: Mapping[str, str] | None = None
    key: str | None = None
    n_threads: int | None = None
    device: str = "auto"
    precision: str = "float32"
    random_state: Any = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # Not `string`, though texts are welcome: with that tag scikit-learn wants any object accepted in X.
        tags.input_tags.allow_nan = True
        return tags

    def _fit(
        self,
        X: Any,
        target_columns: Sequence[Column],
        sample_weight: Any,
        task_weights: Mapping[str, float] | None = None,
    ) -> None:
        """Train on ``X`` and the encoded targets, and set what is known after ``fit``."""
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction is {self.validation_fraction}: give a share of at least 0 and below 1"
            )
        batch, is_numeric = read_table(self, X)
        batch, values, weights = _used_rows(batch, target_columns, sample_weight)
        batch_size = choose_batch_size(self.batch_size, batch.num_rows)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        config = make_config(
            type(self).__name__,
            self.get_params(deep=False),
            seed=seed,
            batch_size=batch_size,
            weights=task_weights,
        )
        if not self.validation_fraction and batch.num_rows <= batch_size:
            batch, values, weights = merge_rows(batch, values, weights)
        held_out = self._held_out(target_columns, values, seed)
        weights = weights / weights[~held_out].mean()
        features, notes = choose_columns(batch, is_numeric, self.columns, self.key)
        schema = TableSchema(
            features=fit_features(features, batch.filter(pa.array(~held_out)), seed),
            targets=[
                fit_target(column.target, values[~held_out, index], weights[~held_out])
                for index, column in enumerate(target_columns)
            ],
            key=self.key,
        )
        model = build_network(config, schema, rows=int((~held_out).sum()))
        if sample_weight is not None or len(np.unique(weights)) > 1:
            model.tasks = tuple(replace(task, where=SAMPLE_WEIGHT) for task in model.tasks)
        arrays = Encoder(schema).features(batch)
        targets = {
            target.name: encode_target(target, values[:, index])
            for index, target in enumerate(schema.targets)
        } | {SAMPLE_WEIGHT: weights.astype(np.float32)}
        splits = [
            Split(*({name: array[rows] for name, array in part.items()} for part in (arrays, targets)))
            for rows in (~held_out, held_out)
        ]
        self.history_, evaluation, self.routing_gain_, result = train(
            model, splits[0], splits[1] if held_out.any() else None, config
        )
        self._columns = list(batch.schema.names)
        self._config, self._schema, self._train_rows = config, schema, len(splits[0])
        # In float64, so that the prediction of a row does not depend on the rows that are predicted with it.
        self.model_ = model.double()
        self.n_iter_ = len(self.history_)
        self.routing_ = {
            name: record.model_dump(exclude={"groups"}) | {"verdict": record.verdict}
            for name, record in evaluation.routing.items()
        }
        self.result_ = {
            "gate": config.gate.name,
            "seed": seed,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "rows": {"train": len(splits[0]), "validation": len(splits[1])},
            "split": "validation" if held_out.any() else "train",
            **result,
            "notes": [*notes, *result["notes"]],
        }

    def _held_out(self, target_columns: Sequence[Column], values: Floats, seed: int) -> npt.NDArray[np.bool_]:
        """Which rows are for validation: drawn at random, by class where one target has classes."""
        held_out = np.zeros(len(values), dtype=bool)
        if not self.validation_fraction:
            return held_out
        if len(values) < 2:
            raise ValueError(
                f"X has {len(values)} sample with a weight above 0, and n_samples=1 leaves no row for "
                "validation: give more rows, or validation_fraction=0"
            )
        size = int(np.ceil(self.validation_fraction * len(values)))
        stratify = None
        if len(target_columns) == 1 and target_columns[0].target.classes:
            _, counts = np.unique(values, return_counts=True)
            if counts.min() >= 2 and min(size, len(values) - size) >= len(counts):
                stratify = values[:, 0]
        rows = np.arange(len(values))
        _, chosen = train_test_split(rows, test_size=size, random_state=seed, stratify=stratify)
        held_out[chosen] = True
        return held_out

    def encode(self, X: Any) -> dict[str, npt.NDArray[Any]]:
        """``X`` as the arrays that the network and the exported file take, by name.

        ``categorical`` int32 (N, columns) codes, ``numeric`` float32 (N, columns) with NaN for missing
        numbers, and ``lists`` int32 (N, elements); each only if there are such columns.
        """
        check_is_fitted(self)
        batch, _ = read_table(self, X, self._columns)
        return Encoder(self._schema).features(batch)

    def _predict(self, X: Any) -> list[npt.NDArray[Any]]:
        """What each task predicts: probabilities (N,) or (N, classes), or numbers (N,)."""
        arrays = self.encode(X)
        outputs: list[list[Tensor]] = []
        with torch.no_grad(), num_threads(self._config.training.threads):
            for batch in evaluation_batches(Split(arrays, {}), EVALUATION_BATCH):
                outputs.append(self.model_(batch.features)[0])
        return [
            task.predict(torch.cat(parts)).numpy()
            for task, parts in zip(self.model_.tasks, zip(*outputs, strict=True), strict=True)
        ]

    def save(self, path: str | Path) -> None:
        """Write the fitted estimator to one safetensors file; :meth:`load` reads it back.

        A ``random_state`` that is not an integer becomes None.
        """
        write_estimator(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The fitted estimator that :meth:`save` wrote; its predictions are the same, bit for bit."""
        return cast(Self, read_estimator(cls, Path(path)))

    def export(
        self,
        path: str | Path,
        format: Literal["onnx", "torch"] = "onnx",
        execution: Literal["dense", "sparse"] = "dense",
    ) -> list[Check]:
        """Write the network as a file that runs without this library, and check its outputs.

        The inputs of the file are the arrays of :meth:`encode`. It has one output per task: the probability
        of the second class, those of all classes, or a number in the units of ``y``.

        Args:
            path: the file to write.
            format: "onnx", or "torch" for ``torch.export.load``.
            execution: "dense" evaluates every expert, "sparse" only the selected ones.

        Returns:
            How far the outputs are from those of the network, for several numbers of rows.
        """
        check_is_fitted(self)
        return export_model(copy.deepcopy(self.model_).float(), Path(path), format, execution)


def _used_rows(
    batch: pa.RecordBatch, target_columns: Sequence[Column], sample_weight: Any
) -> tuple[pa.RecordBatch, Floats, Floats]:
    """The rows with a weight above 0, their targets (N, targets), and their weights (N,)."""
    check_consistent_length(batch, *(column.values for column in target_columns))
    values = np.column_stack([column.values for column in target_columns])
    weights = np.ones(batch.num_rows)
    if sample_weight is not None:
        weights = _check_sample_weight(
            sample_weight, batch.column(0), dtype=np.float64, ensure_non_negative=True
        )
    is_used = weights > 0
    if not is_used.all():
        batch, values, weights = batch.filter(pa.array(is_used)), values[is_used], weights[is_used]
    check_targets(target_columns, values)
    return batch, values, weights
