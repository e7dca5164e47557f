"""The targets of an estimator, encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from comet_moe.experiments.data.table.schema import Target

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Column:
    """One target: its description, and its values (N,), which are indices of classes or numbers, or NaN."""

    target: Target
    values: Floats


def check_targets(columns: Sequence[Column], values: Floats) -> None:
    """ValueError where a column of ``values`` (N, tasks) has nothing to learn."""
    for column, given in zip(columns, values.T, strict=True):
        present = given[~np.isnan(given)]
        if not len(present):
            raise ValueError(f"{column.target.name} has no value in a row with a weight above 0")
        if column.target.classes and len(np.unique(present)) < 2:
            only = column.target.classes[int(present[0])]
            raise ValueError(
                f"{column.target.name} has one class only in the rows with a weight above 0, {only!r}, and a "
                f"classifier needs at least two classes"
            )


def refuse_times(name: str, dtype: Any) -> None:
    """ValueError for dates and durations, which numpy would read as numbers of nanoseconds."""
    if getattr(dtype, "kind", "") in "mM":
        raise ValueError(f"{name} has dates or durations ({dtype}): give a number in the unit that you want")


def fit_target(target: Target, values: Floats, weights: Floats) -> Target:
    """``target`` with what is learned from the train rows."""
    present = ~np.isnan(values)
    update: dict[str, Any] = {"missing": int((~present).sum())}
    if target.classes:
        update["class_counts"] = np.bincount(
            values[present].astype(int), minlength=len(target.classes)
        ).tolist()
    elif present.any():
        mean = float(np.average(values[present], weights=weights[present]))
        update["mean"] = mean
        if target.kind == "regression":
            variance = np.average(np.square(values[present] - mean), weights=weights[present])
            update["std"] = float(np.sqrt(variance)) or 1.0
    return target.model_copy(update=update)


def encode_target(target: Target, values: Floats) -> npt.NDArray[np.float32]:
    """``values`` (N,) as the loss takes them: numbers of a regression are standardised."""
    if target.kind == "regression":
        values = (values - target.mean) / target.std
    return values.astype(np.float32)
