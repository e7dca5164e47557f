"""Linear models on a prepared table: logistic, ridge and Poisson regression of scikit-learn, one per task.

A number is standardised, with a column that says where it is missing. A category is one column per code, a
list one per frequent element, a text one per term. The weight of the squared coefficients is chosen by the
validation loss. A model is its coefficients: arrays, which a file cannot hide anything in.
"""

import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import sparse

from comet_moe.experiments.data.table.schema import TableSchema
from comet_moe.experiments.models import Task
from comet_moe.experiments.training.families import Array, Family, FitData, list_columns, num_elements

STRENGTHS = {
    "logistic": (1.0, 10.0, 100.0, 1000.0, 0.1),
    "ridge": (1.0, 10.0, 100.0, 1000.0, 0.1),
    "count": (1e-3, 1e-2, 1e-1, 1e-4),
}
"""Factors of the sum of squares of the coefficients, in the order in which they are tried."""
ITERATIONS = 200
TIMED_ITERATIONS = 5
"""Iterations of a first fit from whose duration the number that fits into the time is taken."""
LIMIT = 30.0
"""Largest absolute output for a count, whose exponential is then finite."""


class _LinearModels:
    types: frozenset[str] = frozenset()

    def inputs(self, features: Mapping[str, Array], schema: TableSchema) -> sparse.csr_matrix:
        """(N, columns): numbers about their median, where they are missing, codes, elements of lists."""
        parts: list[Any] = []
        if "numeric" in features:
            numbers = np.asarray(features["numeric"], float)
            described = schema.of_kind("numeric")
            median = np.array([feature.median for feature in described])
            scale = np.array([feature.scale for feature in described])
            is_missing = np.isnan(numbers)
            parts.append(sparse.csr_matrix(np.where(is_missing, 0.0, (numbers - median) / scale)))
            parts.append(sparse.csr_matrix(is_missing.astype(float)))
        if "categorical" in features:
            parts.append(_one_hot(np.asarray(features["categorical"]), _num_codes(schema)))
        parts += [sparse.csr_matrix(columns) for columns in list_columns(features, schema)]
        if "texts" in features:
            parts += _terms(np.asarray(features["texts"]), schema)
        return sparse.hstack(parts, format="csr")

    def fit(
        self, task: Task, data: FitData, schema: TableSchema, seconds: float | None
    ) -> tuple[dict[str, Array], bool]:
        """The model with the lowest validation loss of those that could be fitted in time."""
        data = data.with_known_classes() if task.has_classes else data
        deviation = _deviations(data.inputs, len(schema.of_kind("numeric")))
        scaled = data.inputs.multiply(1 / deviation).tocsr()
        kind = "count" if task.kind == "count" else "logistic" if task.has_classes else "ridge"
        import sklearn.linear_model  # noqa: F401 - which takes longer than many a fit

        iterations, started = ITERATIONS, time.perf_counter()
        if seconds is not None:
            _fit(kind, scaled, data.targets, STRENGTHS[kind][0], TIMED_ITERATIONS)
            per_fit = seconds / len(STRENGTHS[kind])
            share = per_fit / max(time.perf_counter() - started, 1e-6)
            iterations = int(min(max(share, 1) * TIMED_ITERATIONS, ITERATIONS))
        best: dict[str, Array] = {}
        lowest = np.inf
        for strength in STRENGTHS[kind]:
            fitted = _fit(kind, scaled, data.targets, strength, iterations)
            fitted["coefficients"] = fitted["coefficients"] / deviation
            if len(data.held_out_targets) == 0:
                return fitted, True
            loss = self._loss(task, fitted, data)
            if loss < lowest or not best:
                best, lowest = fitted, loss
            is_over = seconds is not None and time.perf_counter() - started > seconds
            if is_over and strength != STRENGTHS[kind][-1]:
                return best, False
        return best, True

    def outputs(self, task: Task, model: dict[str, Array], inputs: sparse.csr_matrix) -> Array:
        """Logits, standardised numbers, or logarithms of counts."""
        scores: Array = inputs @ model["coefficients"].T + model["intercepts"]
        if task.kind == "multiclass":
            if scores.shape[1] == 1:  # of two classes: the logit of the second
                scores = np.concatenate([np.zeros_like(scores), scores], 1)
            logits = np.repeat(scores.min(1, keepdims=True) - LIMIT, task.outputs, 1)  # of a class not seen
            logits[:, model["classes"].astype(int)] = scores
            return logits
        return np.clip(scores, -LIMIT, LIMIT) if task.kind == "count" else scores

    def check(self, task: Task, model: Any, schema: TableSchema) -> dict[str, Array]:
        """Arrays of the shapes of task and table."""
        columns = 2 * len(schema.of_kind("numeric")) + sum(_num_codes(schema))
        columns += sum(num_elements(feature.num_codes) for feature in schema.of_kind("list"))
        columns += sum(len(feature.categories) for feature in schema.of_kind("text"))
        classes = model["classes"]
        rows = 1 if task.kind != "multiclass" or len(classes) == 2 else len(classes)
        is_sound = (
            set(model) == {"coefficients", "intercepts", "classes"}
            and all(isinstance(array, np.ndarray) and array.dtype == float for array in model.values())
            and model["coefficients"].shape == (rows, columns)
            and model["intercepts"].shape == (rows,)
            and (classes == np.unique(classes)).all()
            and (not len(classes) or ((classes >= 0).all() and (classes < max(task.outputs, 2)).all()))
            and (task.kind != "multiclass" or len(classes) > 1)
        )
        if not is_sound:
            raise ValueError("its coefficients do not fit the table")
        return dict(model)

    def _loss(self, task: Task, model: dict[str, Array], data: FitData) -> float:
        """The mean loss on the validation rows."""
        import torch

        outputs = torch.from_numpy(self.outputs(task, model, data.held_out_inputs))
        loss, count = task.loss(outputs, {task.name: torch.from_numpy(data.held_out_targets)})
        return float(loss / count)


FAMILY: Family = _LinearModels()


def _fit(kind: str, inputs: Any, targets: Array, strength: float, iterations: int) -> dict[str, Array]:
    """A model with this weight of the squares of its coefficients, after at most that many ``iterations``."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge

    if kind == "logistic":
        model = LogisticRegression(C=1 / strength, max_iter=iterations)
    elif kind == "ridge":
        model = Ridge(alpha=strength, solver="sparse_cg", tol=1e-6, max_iter=5 * iterations)
    else:
        model = PoissonRegressor(alpha=strength, max_iter=iterations)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(inputs, targets)
    return {
        "coefficients": np.atleast_2d(model.coef_).astype(float),
        "intercepts": np.atleast_1d(model.intercept_).astype(float),
        "classes": np.array(getattr(model, "classes_", []), dtype=float),
    }


def _deviations(inputs: sparse.csr_matrix, numbers: int) -> Array:
    """The standard deviation of each of the first columns, which are numbers; 1 for the others."""
    first = inputs[:, :numbers]
    mean = np.asarray(first.mean(0)).ravel()
    squares = np.asarray(first.multiply(first).mean(0)).ravel()
    deviation = np.sqrt(np.maximum(squares - mean**2, 0.0))
    rest = np.ones(inputs.shape[1] - numbers)
    return np.concatenate([np.where(deviation > 1e-12, deviation, 1.0), rest])


def _terms(codes: Array, schema: TableSchema) -> list[sparse.csr_matrix]:
    """For each text (N, terms): the weights of its terms, in rows of length 1."""
    parts, first = [], 0
    for feature in schema.of_kind("text"):
        of_text = codes[:, first : first + feature.length]
        first += feature.length
        row, place = np.nonzero(of_text >= 0)
        term = of_text[row, place]
        weights = np.asarray(feature.weights, dtype=float)[term]
        lengths = np.sqrt(np.bincount(row, weights**2, minlength=len(codes)))
        shape = (len(codes), len(feature.categories))
        parts.append(sparse.csr_matrix((weights / np.maximum(lengths[row], 1e-6), (row, term)), shape=shape))
    return parts


def _one_hot(codes: Array, num_codes: list[int]) -> sparse.csr_matrix:
    """(N, sum of num_codes): one column per code of each of the (N, columns) categories."""
    rows, columns = codes.shape
    positions = codes.astype(np.int64) + np.concatenate([[0], np.cumsum(num_codes)[:-1]])[None]
    starts = np.arange(0, rows * columns + 1, columns)
    ones = np.ones(rows * columns)
    return sparse.csr_matrix((ones, positions.ravel(), starts), shape=(rows, int(sum(num_codes))))


def _num_codes(schema: TableSchema) -> list[int]:
    return [feature.num_codes for feature in schema.of_kind("categorical")]
