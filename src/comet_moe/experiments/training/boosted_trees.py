"""scikit-learn's boosted trees (HistGradientBoosting) on a prepared table, one model per task.

Categorical features with at most 255 codes are categorical there too; those with more are read as numbers.
The most frequent elements of a list are separate features, and so are the most frequent terms of a text. The
trees stop when the loss on the validation split no longer falls.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from comet_moe.experiments.data.table.schema import TableSchema
from comet_moe.experiments.data.table.text import count_dense, dense_terms
from comet_moe.experiments.models import Task
from comet_moe.experiments.training.families import Array, Family, FitData, list_columns, num_elements

MAX_CATEGORIES = 255
MAX_ROUNDS = 500
TEXT_TERMS = 300
TIMED_ROUNDS = 10
"""Rounds of a first fit from whose duration the number that fits into the time is taken."""
_SMALLEST_PROBABILITY = 1e-7


class _BoostedTrees:
    types = frozenset(
        {
            "functools.partial",
            "sklearn._loss.link.Interval",
            "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
            "sklearn.utils.validation.check_array",
        }
    )

    def inputs(self, features: Mapping[str, Array], schema: TableSchema) -> Array:
        """See `tree_inputs`."""
        return tree_inputs(features, schema)

    def fit(self, task: Task, data: FitData, schema: TableSchema, seconds: float | None) -> tuple[Any, bool]:
        """Trees until the validation loss no longer falls, or the time is over."""
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        settings = {"categorical_features": _categorical_columns(schema), "random_state": 0}
        if task.has_classes:
            model = HistGradientBoostingClassifier(**settings)
            data = data.with_known_classes()
        else:
            loss = "poisson" if task.kind == "count" else "squared_error"
            model = HistGradientBoostingRegressor(loss=loss, **settings)
        has_held_out = len(data.held_out_targets) > 0
        held_out = {"X_val": data.held_out_inputs, "y_val": data.held_out_targets} if has_held_out else {}
        rounds = MAX_ROUNDS
        if seconds is not None:
            started = time.perf_counter()
            model.set_params(max_iter=TIMED_ROUNDS, early_stopping=False)
            model.fit(data.inputs, data.targets)
            per_round = (time.perf_counter() - started) / TIMED_ROUNDS
            rounds = int(min(max(seconds / per_round - TIMED_ROUNDS, 1), MAX_ROUNDS))
        model.set_params(max_iter=rounds, early_stopping=has_held_out)
        model.fit(data.inputs, data.targets, **held_out)
        return model, model.n_iter_ < rounds or rounds == MAX_ROUNDS

    def outputs(self, task: Task, model: Any, inputs: Array) -> Array:
        """Logits, standardised numbers, or logarithms of counts."""
        if task.has_classes:
            probability = np.full((len(inputs), max(2, task.outputs)), 0.0)
            probability[:, model.classes_.astype(int)] = model.predict_proba(inputs)
            logits: Array = np.log(np.clip(probability, _SMALLEST_PROBABILITY, 1.0))
            return logits if task.kind == "multiclass" else logits[:, 1:] - logits[:, :1]
        output: Array = model.predict(inputs)[:, None]
        return np.log(np.maximum(output, _SMALLEST_PROBABILITY)) if task.kind == "count" else output

    def check(self, task: Task, model: Any, schema: TableSchema) -> Any:
        """Whether every node of the trees names nodes, columns and categories that exist.

        scikit-learn's compiled prediction does not check them.
        """
        columns = num_columns(schema)
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
                raise ValueError("its trees do not fit the table")
        if model.n_features_in_ != columns:
            raise ValueError("its trees do not fit the table")
        return model


FAMILY: Family = _BoostedTrees()


def tree_inputs(features: Mapping[str, Array], schema: TableSchema) -> Array:
    """(N, columns) float64: codes, numbers, frequent elements of lists, weights of the frequent terms."""
    parts = [np.asarray(features[name], float) for name in ("categorical", "numeric") if name in features]
    parts += list_columns(features, schema)
    if "texts" in features:
        parts.append(dense_terms(schema, features["texts"], TEXT_TERMS))
    return np.concatenate(parts, 1)


def num_columns(schema: TableSchema) -> int:
    """The columns of `tree_inputs`; those of the categories are the first."""
    elements = sum(num_elements(feature.num_codes) for feature in schema.of_kind("list"))
    terms = sum(count_dense(feature, TEXT_TERMS) for feature in schema.of_kind("text"))
    return len(schema.of_kind("categorical")) + len(schema.of_kind("numeric")) + elements + terms


def _categorical_columns(schema: TableSchema) -> Array:
    """(columns,) bool: which columns of the inputs scikit-learn reads as categories."""
    is_categorical = np.zeros(num_columns(schema), dtype=bool)
    few = [feature.num_codes <= MAX_CATEGORIES for feature in schema.of_kind("categorical")]
    is_categorical[: len(few)] = few
    return is_categorical
