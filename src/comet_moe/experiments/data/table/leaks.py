"""Columns that give a target away: they determine it nearly alone, or their order is that of the target.

A column is judged by what its values, or bins of its numbers, say about other rows. The means of the target
on half of the rows predict it on the other half.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from comet_moe.experiments.data.table.scan import ColumnScan
from comet_moe.experiments.data.table.schema import Target
from comet_moe.experiments.data.table.values import Codes, Floats, as_categories, as_numbers

ROWS_PER_VALUE = 5
"""A column can determine a target only with at least this many rows per distinct value."""
FEWEST_ROWS = 20
MOST_BINS = 100
DETERMINED = {"AUC": 0.99, "share of wrong guesses that it avoids": 0.98, "R²": 0.995}
"""A column that predicts a target so well is taken for the target in other words."""
SAME_ORDER = 0.999
"""Rank correlation of a column that has the order of the target."""
ORDERED_BY_ID = 0.9
"""A column that identifies rows leaks a target with at least this rank correlation."""


def find_leaks(
    sample: pa.Table, scans: Mapping[str, ColumnScan], targets: Sequence[Target], columns: Sequence[str]
) -> list[str]:
    """A warning per column and target that it gives away; ``sample`` has no row twice."""
    values = {target.name: _target_values(target, _array(sample, target.column)) for target in targets}
    own = {target.column for target in targets}
    warnings: list[str | None] = []
    for name in columns:
        if name in own or scans[name].is_list:
            continue
        column = _array(sample, name)
        is_number = not scans[name].number.texts
        numbers = as_numbers(column, scans[name].number.decimal) if is_number else None
        if numbers is None:
            codes, texts = as_categories(column)
            distinct = len(texts)
        else:
            found, codes = np.unique(numbers, return_inverse=True)
            distinct = len(found)
        for target in targets:
            present = ~np.isnan(values[target.name])
            if numbers is not None:
                present &= np.isfinite(numbers)
            rows = values[target.name][present]
            if len(rows) < FEWEST_ROWS or rows.min() == rows.max():
                continue
            order = None if numbers is None else _order_warning(scans[name], target, numbers[present], rows)
            warnings.append(order or _value_warning(name, target, codes, distinct, numbers, present, rows))
    return [warning for warning in warnings if warning]


def _array(sample: pa.Table, name: str) -> pa.Array:
    return sample.column(name).combine_chunks()


def _target_values(target: Target, values: pa.Array) -> Floats:
    if target.kind in ("regression", "count"):
        return as_numbers(values, target.decimal)
    codes, texts = as_categories(values)
    if target.kind == "binary":
        positive = target.positive or target.classes[1]
        return np.array([*(float(text == positive) for text in texts), np.nan])[codes]
    return np.where(codes < 0, np.nan, codes.astype(np.float64))


def _order_warning(scan: ColumnScan, target: Target, numbers: Floats, values: Floats) -> str | None:
    if target.kind == "multiclass" or numbers.min() == numbers.max():
        return None
    if target.kind == "binary":  # 2 AUC - 1, so that a perfect order is 1
        correlation = abs(2 * _auc(numbers, values) - 1)
    else:
        correlation = abs(float(np.corrcoef(_ranks(numbers), _ranks(values))[0, 1]))
    if correlation >= SAME_ORDER:
        return (
            f"column {scan.name} has the order of the target {target.name}: leave it out unless it is known "
            f"before the target is."
        )
    identifies = scan.number.is_integer and (scan.identifies_rows or scan.is_row_number)
    if identifies and correlation >= ORDERED_BY_ID:
        return (
            f"column {scan.name} identifies the rows and leaks the target {target.name} by its order (rank "
            f"correlation {correlation:.2f}): leave it out."
        )
    return None


def _value_warning(
    name: str,
    target: Target,
    codes: Codes,
    distinct: int,
    numbers: Floats | None,
    present: npt.NDArray[np.bool_],
    values: Floats,
) -> str | None:
    codes = codes[present]
    if len(values) < ROWS_PER_VALUE * distinct:
        if numbers is None:
            return None
        bins = max(2, min(MOST_BINS, len(values) // (4 * ROWS_PER_VALUE)))
        edges = np.quantile(numbers[present], np.linspace(0, 1, bins + 1)[1:-1])
        codes = np.searchsorted(edges, numbers[present], side="right")
    metric, score = _held_out_score(codes + 1, values, target.kind)
    if not score >= DETERMINED[metric]:
        return None
    return (
        f"column {name} determines the target {target.name} (nearly) alone ({metric} {score:.3f}): leave it "
        f"out unless it is known before the target is."
    )


def _held_out_score(codes: Codes, values: Floats, kind: str) -> tuple[str, float]:
    """How well the values of every second row, by code, predict those of the others; NaN if there are few."""
    size = int(codes.max()) + 1
    known, tested = (codes[::2], values[::2]), (codes[1::2], values[1::2])
    if kind == "multiclass":
        table = np.zeros((size, int(values.max()) + 1))
        np.add.at(table, (known[0], known[1].astype(np.int64)), 1)
        wrong_without = len(tested[1]) - np.unique(tested[1], return_counts=True)[1].max()
        wrong = int((table.argmax(1)[tested[0]] != tested[1]).sum())
        return "share of wrong guesses that it avoids", 1 - wrong / wrong_without if wrong_without else np.nan
    counts = np.bincount(known[0], minlength=size)
    sums = np.bincount(known[0], known[1], minlength=size)
    guess = np.where(counts > 0, sums / np.maximum(counts, 1), known[1].mean())[tested[0]]
    if kind == "binary":
        positive = tested[1].sum()
        is_enough = min(positive, len(tested[1]) - positive) >= ROWS_PER_VALUE
        return "AUC", _auc(guess, tested[1]) if is_enough else np.nan
    spread = tested[1].var()
    return "R²", float(1 - ((tested[1] - guess) ** 2).mean() / spread) if spread > 0 else np.nan


def _auc(scores: Floats, labels: Floats) -> float:
    positive = labels.sum()
    ranks = _ranks(scores)[labels == 1].sum()
    return float((ranks - positive * (positive + 1) / 2) / (positive * (len(labels) - positive)))


def _ranks(values: Floats) -> Floats:
    """The mean rank of each value. By pandas: scipy.stats takes a second to import, and 50 MB."""
    return pd.Series(values).rank().to_numpy()
