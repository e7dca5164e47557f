"""X as record batches, from arrays and DataFrames, the features that are made of it, and the targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
from sklearn.utils.validation import validate_data

from comet_moe.experiments.data.table.fit import SchemaFitter
from comet_moe.experiments.data.table.inspect import describe_unusable
from comet_moe.experiments.data.table.roles import choose_features
from comet_moe.experiments.data.table.scan import ColumnScan
from comet_moe.experiments.data.table.schema import Feature, TableOptions, Target
from comet_moe.experiments.data.table.values import as_numbers, is_number, text_of

Floats = npt.NDArray[np.float64]
LARGEST = float(np.finfo(np.float32).max)


def read_table(estimator: Any, X: Any, names: Sequence[str] | None = None) -> tuple[pa.RecordBatch, bool]:
    """The rows of ``X`` as a record batch, and whether all columns are numbers.

    Args:
        estimator: sets or checks its ``n_features_in_`` and ``feature_names_in_``, as scikit-learn does.
        X: an array (N, columns), a DataFrame of pandas or of another library that speaks Arrow.
        names: those of the columns that the estimator was fitted on; None while it is fitted.
    """
    reset = names is None
    table = _as_frame(X)
    if table is None:
        numbers = validate_data(estimator, X, reset=reset, dtype=np.float32, ensure_all_finite="allow-nan")
        arrays = [pa.array(np.ascontiguousarray(column)) for column in numbers.T]
        own_names = [f"x{index}" for index in range(len(arrays))]
    else:
        arrays, own_names = table
        repeated = next((name for name in own_names if own_names.count(name) > 1), None)
        if repeated is not None:
            raise ValueError(f"X has two columns called {repeated}: rename one of them")
        validate_data(estimator, X, reset=reset, skip_check_array=True)
        if not arrays or not len(arrays[0]):
            raise ValueError(
                f"X has {len(arrays)} columns and {len(arrays[0]) if arrays else 0} rows: give at least one "
                f"of each"
            )
        for name, values in zip(own_names, arrays, strict=True):
            if is_number(values.type) and np.nanmax(np.abs(as_numbers(values)), initial=0.0) > LARGEST:
                raise ValueError(
                    f"Input X contains infinity or a value too large for dtype('float32') in column {name}."
                )
    is_numeric = all(is_number(array.type) or pa.types.is_boolean(array.type) for array in arrays)
    if is_numeric:  # the same numbers in an array and in a frame
        arrays = [pa.array(as_numbers(array).astype(np.float32)) for array in arrays]
    return pa.RecordBatch.from_arrays(arrays, names=list(names or own_names)), is_numeric


def _as_frame(X: Any) -> tuple[list[pa.Array], list[str]] | None:
    """The columns of ``X`` with their names; None for what is an array of numbers, or should be one."""
    if isinstance(X, pa.RecordBatch | pa.Table) or (
        not isinstance(X, pd.DataFrame) and hasattr(X, "__arrow_c_stream__")
    ):
        X = pa.table(X)
        return [column.combine_chunks() for column in X.columns], list(X.column_names)
    if not isinstance(X, pd.DataFrame):
        values = np.asarray(X)
        holds_text = values.dtype.kind in "US" or (
            values.dtype.kind == "O" and any(isinstance(value, str) for value in values.flat)
        )
        if values.ndim != 2 or not holds_text:
            return None
        X = pd.DataFrame(values).rename(columns=lambda index: f"x{index}")
    return [_as_arrow(X.iloc[:, index]) for index in range(X.shape[1])], [str(name) for name in X.columns]


def _as_arrow(values: pd.Series) -> pa.Array:
    if values.dtype.kind == "c":
        raise ValueError(f"Complex data not supported: column {values.name} of X is complex")
    try:
        array = pa.Array.from_pandas(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):  # of several types
        other = next((value for value in values if not pd.api.types.is_scalar(value)), None)
        if other is not None:
            raise TypeError(
                f"a value of X must be a string or a number, but column {values.name} has {type(other)}"
            ) from None
        array = pa.array([None if pd.isna(value) else text_of(value) for value in values], pa.string())
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def choose_columns(
    batch: pa.RecordBatch, is_numeric: bool, columns: Mapping[str, str] | None, key: str | None
) -> tuple[list[Feature], list[str]]:
    """The features of the rows, and notes on columns that are left out.

    Args:
        batch: all rows.
        is_numeric: whether all columns that ``columns`` does not name are numeric, without a look at them.
        columns: kinds of columns by name, which override what is inferred.
        key: the categorical column that hash gates route by.
    """
    given = dict(columns or {})
    if key is not None:
        given.setdefault(key, "categorical")
    kinds = {**dict.fromkeys(batch.schema.names, "numeric"), **given} if is_numeric else given
    options = TableOptions.read({"targets": ["y"], "columns": kinds, "key": key})
    scans = {name: ColumnScan(name) for name in batch.schema.names}
    if not is_numeric:
        for name, scan in scans.items():
            scan.add(batch.column(name))
    source: Any = "X"
    features, notes, unusable = choose_features(scans, options, [], source, split="random")
    return features, [*notes, *describe_unusable(scans, unusable)]


def fit_features(features: Sequence[Feature], batch: pa.RecordBatch, seed: int) -> list[Feature]:
    """``features`` with vocabularies and bins from the rows of ``batch``, which are all train rows."""
    defaults = TableOptions.read({"targets": ["y"]})
    fitter = SchemaFitter(features, [], defaults, seed)
    fitter.add(batch)
    return fitter.fitted_features()


def merge_rows(
    batch: pa.RecordBatch, targets: Floats, weights: Floats
) -> tuple[pa.RecordBatch, Floats, Floats]:
    """Equal rows as one with the sum of their weights, in the order of their values.

    If one batch holds all rows, this changes neither the loss nor its gradient. A row of weight 2 then gives
    the same model as the row given twice, bit for bit. Tables with other columns than numbers stay as they
    are.

    Args:
        batch: N rows.
        targets: (N, tasks).
        weights: (N,).
    """
    if not all(is_number(kind) for kind in batch.schema.types):
        return batch, targets, weights
    frame = pd.DataFrame(np.column_stack([*(as_numbers(column) for column in batch.columns), targets]))
    number = frame.groupby(list(frame), sort=True, dropna=False).ngroup().to_numpy()
    _, first = np.unique(number, return_index=True)
    return (
        batch.take(pa.array(first)),
        targets[first],
        np.bincount(number, weights=weights).astype(np.float64),
    )


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
