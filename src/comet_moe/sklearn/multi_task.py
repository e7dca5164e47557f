"""Several targets at once: one network with a gate and a head per task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.metrics import accuracy_score, r2_score

from comet_moe.experiments.data.table.schema import TARGET_KINDS, Target, TargetKind
from comet_moe.sklearn.base import BaseMoE
from comet_moe.sklearn.estimators import two_columns
from comet_moe.sklearn.inputs import Column, refuse_times


@dataclass(eq=False, repr=False)
class MultiTaskMoE(BaseMoE):
    """Several targets of the same rows: shared experts, and a gate and a head per task.

    The other parameters and attributes are those of :class:`MoEClassifier`; ``routing_`` and the metrics of
    ``history_`` and ``result_`` have an entry for each task.

    Args:
        tasks: kind of each target by its name: "binary", "multiclass", "regression" or "count".
        task_weights: factors of the tasks' losses by name; 1 / number of tasks where they are not given.

    Attributes:
        classes_: the classes of each "binary" and "multiclass" task, by name.

    Example:
        >>> import numpy as np, pandas as pd
        >>> from comet_moe.sklearn import MultiTaskMoE
        >>> rng = np.random.default_rng(0)
        >>> X = pd.DataFrame({"age": rng.uniform(18, 80, 200), "city": rng.choice(["Bern", "Rome"], 200)})
        >>> Y = pd.DataFrame({"buys": np.where(X["age"] > 40, "yes", "no"), "hours": X["age"] / 10})
        >>> model = MultiTaskMoE(tasks={"buys": "binary", "hours": "regression"}, epochs=5, random_state=0)
        >>> model.fit(X, Y).predict(X).columns.tolist()
        ['buys', 'hours']
        >>> model.predict_proba(X)["buys"].shape
        (200, 2)
    """

    tasks: Mapping[str, str] | None = None
    gate: str = "comet"
    task_weights: Mapping[str, float] | None = field(default=None, kw_only=True)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, Y: Any, sample_weight: Any = None) -> Self:
        """Train on rows ``X`` (N, columns) with targets ``Y`` (N, tasks).

        Args:
            X: array or DataFrame.
            Y: DataFrame with a column for each task, others being ignored, or an array with the tasks in
                order. A missing value has no loss.
            sample_weight: (N,) weights of the rows, in all tasks; rows of weight 0 are left out.
        """
        classes: dict[str, npt.NDArray[Any]] = {}
        columns = []
        for (name, kind), values in zip(self._kinds().items(), self._read_targets(Y), strict=True):
            if kind in ("binary", "multiclass"):
                classes[name], codes = _read_classes(name, kind, values)
                texts = [str(value) for value in classes[name]]
                columns.append(Column(Target(name=name, column=name, kind=kind, classes=texts), codes))
            else:
                numbers = _read_numbers(name, kind, values)
                columns.append(Column(Target(name=name, column=name, kind=kind), numbers))
        self._fit(X, columns, sample_weight, self.task_weights)
        self.classes_ = classes
        return self

    def predict(self, X: Any) -> pd.DataFrame:
        """A class or a number for each task: a DataFrame with a row for each of ``X``."""
        predictions: dict[str, Any] = {}
        predicted = self._predict(X)
        for target, values in zip(self._schema.targets, predicted, strict=True):
            if target.classes:
                values = self.classes_[target.name][two_columns(values).argmax(-1)]
            predictions[target.name] = values
        index = X.index if isinstance(X, pd.DataFrame) else pd.RangeIndex(len(predicted[0]))
        return pd.DataFrame(predictions, index=index)

    def predict_proba(self, X: Any) -> dict[str, npt.NDArray[np.float64]]:
        """Probabilities (N, classes) of each "binary" and "multiclass" task, by name."""
        predicted = self._predict(X)
        return {
            target.name: two_columns(values)
            for target, values in zip(self._schema.targets, predicted, strict=True)
            if target.classes
        }

    def score(self, X: Any, Y: Any, sample_weight: Any = None) -> float:
        """Mean over the tasks of accuracy or R², each over the rows that have a target."""
        predicted = self.predict(X)
        scores = []
        for name, values in zip(self._kinds(), self._read_targets(Y), strict=True):
            is_present = ~values.isna().to_numpy()
            metric = accuracy_score if name in self.classes_ else r2_score
            weights = None if sample_weight is None else np.asarray(sample_weight)[is_present]
            given, expected = predicted[name].to_numpy()[is_present], values[is_present].to_numpy()
            scores.append(metric(expected, given, sample_weight=weights))
        return float(np.mean(scores))

    def _kinds(self) -> dict[str, TargetKind]:
        """The kind of each task, checked."""
        if not isinstance(self.tasks, Mapping) or not self.tasks:
            raise ValueError(
                f"tasks is {self.tasks!r}: give the kind of each target by its name, such as "
                f"{{'income': 'binary', 'hours': 'regression'}}"
            )
        for name, kind in self.tasks.items():
            if kind not in TARGET_KINDS:
                raise ValueError(
                    f"the kind of task {name} is {kind!r}: choose one of {', '.join(TARGET_KINDS)}"
                )
        return {str(name): cast(TargetKind, kind) for name, kind in self.tasks.items()}

    def _read_targets(self, Y: Any) -> list[pd.Series]:
        """The targets of each task, in order."""
        names = list(self._kinds())
        if Y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None: give a DataFrame "
                f"with the columns {', '.join(names)}"
            )
        if not isinstance(Y, pd.DataFrame):
            values = np.asarray(Y)
            if values.ndim != 2 or values.shape[1] != len(names):
                raise ValueError(
                    f"Y has the shape {values.shape}: give a column for each of the {len(names)} tasks"
                )
            return [pd.Series(values[:, index]).infer_objects() for index in range(len(names))]
        missing = next((name for name in names if name not in Y.columns), None)
        if missing is not None:
            raise ValueError(
                f"Y has no column {missing}, which is a task: its columns are {', '.join(map(str, Y))}"
            )
        twice = next((name for name in names if list(Y.columns).count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"Y has two columns called {twice}: rename one of them")
        return [Y[name] for name in names]


def _read_classes(
    name: str, kind: str, values: pd.Series
) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
    """The classes in order, and the index (N,) of each value, NaN where it is missing."""
    is_present = ~values.isna().to_numpy()
    present = values[is_present].to_numpy()
    if present.dtype.kind == "f" and (present == np.floor(present)).all():  # integers beside a NaN
        present = present.astype(np.int64)
    classes, indices = np.unique(present, return_inverse=True)
    if kind == "binary" and len(classes) > 2:
        raise ValueError(f"{name} has {len(classes)} classes, where a binary task has 2: choose multiclass")
    codes = np.full(len(values), np.nan)
    codes[is_present] = indices
    return classes, codes


def _read_numbers(name: str, kind: str, values: pd.Series) -> npt.NDArray[np.float64]:
    """Numbers (N,), NaN where one is missing."""
    refuse_times(name, values.dtype)
    try:
        numbers = pd.to_numeric(values).to_numpy(np.float64, na_value=np.nan)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{name} has a value that is not a number, but its kind is {kind}: {error}"
        ) from error
    if np.isinf(numbers).any():
        raise ValueError(
            f"{name} has an infinite value: correct it, or make it NaN, which is a missing target"
        )
    present = numbers[~np.isnan(numbers)]
    if kind == "count" and ((present < 0) | (present != np.floor(present))).any():
        raise ValueError(
            f"{name} has a value that is no count: choose regression for numbers below 0 or between integers"
        )
    return numbers
