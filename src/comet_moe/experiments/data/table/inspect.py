"""A look at a table before training: its columns with their kinds, and warnings about misleading ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.splits import make_rng
from comet_moe.experiments.data.table.roles import choose_targets, infer_kind
from comet_moe.experiments.data.table.scan import MAX_DISTINCT, ColumnScan, scan_table
from comet_moe.experiments.data.table.schema import TableOptions, Target
from comet_moe.experiments.data.table.source import TableSource, find_tables
from comet_moe.experiments.data.table.values import Floats, as_categories, as_numbers

SAMPLE_ROWS = 50_000
"""About this many rows are sampled to find columns that give a target away."""
ROWS_PER_VALUE = 5
"""A column can determine a target only with at least this many rows per distinct value."""
DETERMINED = 0.999
"""A column that explains at least this share of a target is taken for the target in other words."""
ORDERED_BY_ID = 0.9
"""A column that identifies rows leaks a target with at least this rank correlation."""


@dataclass(frozen=True)
class ColumnReport:
    """One column: ``role`` is "feature", "target" or "left out"; ``distinct`` is None if there are many."""

    name: str
    role: str
    kind: str | None
    missing: float
    distinct: int | None
    examples: list[str]
    reason: str | None = None


@dataclass(frozen=True)
class TableReport:
    """What ``comet-moe data inspect`` shows."""

    files: list[str]
    rows: int
    columns: list[ColumnReport]
    warnings: list[str]
    notes: list[str]


def inspect_table(path: Path, options: Mapping[str, Any]) -> TableReport:
    """Infer the schema of a table, and look for columns that mislead.

    Args:
        path: a table, a folder of tables or a pattern.
        options: of the data set ``table``; without targets, all columns are taken for features.
    """
    has_targets = bool(options.get("targets"))
    read = TableOptions.read({**options, "targets": options.get("targets") or ["-"]})
    source = TableSource(find_tables(path), read.encoding, read.separator, read.missing)
    scans = scan_table(source)
    targets, notes = choose_targets(scans, read, source) if has_targets else ([], [])
    warnings: list[str] = []
    columns = [_report_column(scan, read, targets, source, warnings) for scan in scans.values()]
    features = [column.name for column in columns if column.role == "feature"]
    identifying = [name for name, scan in scans.items() if scan.identifies_rows and not scan.texts]
    warnings += _find_leaks(source, scans, targets, list(dict.fromkeys([*features, *identifying])))
    rows = next(iter(scans.values())).rows
    files = [str(file) for file in source.paths]
    return TableReport(files, rows, columns, warnings, [*source.notes, *notes])


def _report_column(
    scan: ColumnScan,
    options: TableOptions,
    targets: Sequence[Target],
    source: TableSource,
    warnings: list[str],
) -> ColumnReport:
    role, reason = "feature", None
    target = next((target for target in targets if target.column == scan.name), None)
    kind: str | None = options.columns.get(scan.name)
    is_excluded = target is None and scan.name in options.exclude
    if target is not None:
        role, kind = "target", target.kind
    elif is_excluded:
        role, reason = "left out", "by the option exclude"
    elif kind is None:
        try:
            kind, reason = infer_kind(scan, source)
        except DataError as error:
            warnings.append(str(error))
            kind, reason = None, "numbers and texts are mixed"
        role = "feature" if kind is not None else "left out"
    if scan.looks_like_date and not scan.is_date and scan.texts and role != "target" and not is_excluded:
        text = next(iter(sorted(scan.counts)))
        use = "left out" if kind is None else f"read as {kind}"
        warnings.append(
            f"column {scan.name} looks like dates, such as {text!r}, but is {use}: write them as 2024-01-31 "
            f"for parts of dates."
        )
    elif role == "left out" and not is_excluded and len(scan.counts) <= 1 and scan.is_readable:
        warnings.append(f"column {scan.name} is constant and left out: {reason}.")
    distinct = None if scan.has_many else len(scan.counts)
    examples = sorted(scan.counts, key=lambda text: (-scan.counts[text], text))[:3]
    return ColumnReport(
        scan.name, role, kind, scan.missing / scan.rows, distinct, [text[:40] for text in examples], reason
    )


def _find_leaks(
    source: TableSource, scans: Mapping[str, ColumnScan], targets: Sequence[Target], columns: Sequence[str]
) -> list[str]:
    """Warnings about columns that determine a target, or whose order of ids is that of a target."""
    own = list(dict.fromkeys(target.column for target in targets))
    usable = [name for name in columns if not scans[name].is_list and name not in own]
    if not targets or not usable:
        return []
    sample = _sample_rows(source, [*usable, *own], scans[usable[0]].rows)
    warnings: list[str | None] = []
    for target in targets:
        values = _target_values(target, sample.column(target.column).combine_chunks())
        is_present = ~np.isnan(values)
        if len(np.unique(values[is_present])) < 2:
            continue
        for name in usable:
            column = sample.column(name).combine_chunks().filter(pa.array(is_present))
            warnings.append(_describe_leak(scans[name], target, column, values[is_present]))
    return [warning for warning in warnings if warning]


def _sample_rows(source: TableSource, columns: Sequence[str], rows: int) -> pa.Table:
    rng = make_rng(0, "inspect")
    samples = [
        pa.Table.from_batches([batch.filter(pa.array(rng.random(batch.num_rows) < SAMPLE_ROWS / rows))])
        for batch in source.batches(columns)
    ]
    return pa.concat_tables(samples, promote_options="permissive")


def _target_values(target: Target, values: pa.Array) -> Floats:
    if target.kind in ("regression", "count"):
        return as_numbers(values)
    codes, texts = as_categories(values)
    if target.positive is not None:
        return np.array([*(float(text == target.positive) for text in texts), np.nan])[codes]
    return np.where(codes < 0, np.nan, codes.astype(np.float64))


def _describe_leak(scan: ColumnScan, target: Target, column: pa.Array, values: Floats) -> str | None:
    codes, texts = as_categories(column)
    if len(texts) > 1 and len(values) >= ROWS_PER_VALUE * len(texts):
        if _explained_share(codes, values, target.kind in ("binary", "multiclass")) >= DETERMINED:
            return (
                f"column {scan.name} determines the target {target.name} (nearly) alone: leave it out unless "
                f"it is known before the target is."
            )
        return None
    if target.kind == "multiclass" or scan.texts:
        return None
    correlation = abs(_rank_correlation(as_numbers(column), values))
    if correlation >= DETERMINED:
        return (
            f"column {scan.name} has the order of the target {target.name}: leave it out unless it is known "
            f"before the target is."
        )
    if scan.identifies_rows and scan.is_integer and correlation >= ORDERED_BY_ID:
        return (
            f"column {scan.name} identifies the rows and leaks the target {target.name} by its order (rank "
            f"correlation {correlation:.2f}): leave it out."
        )
    return None


def _explained_share(codes: npt.NDArray[np.int64], values: Floats, is_class: bool) -> float:
    """Share of the target that the column explains: of wrong guesses that it avoids, or of the variance."""
    group = codes + 1
    if is_class:
        classes = values.astype(np.int64)
        table = np.zeros((group.max() + 1, classes.max() + 1))
        np.add.at(table, (group, classes), 1)
        wrong_without = len(values) - table.sum(0).max()
        return float(1 - (len(values) - table.max(1).sum()) / max(wrong_without, 1))
    counts = np.maximum(np.bincount(group), 1)
    means = np.bincount(group, values) / counts
    return float(1 - ((values - means[group]) ** 2).mean() / max(values.var(), 1e-300))


def _rank_correlation(numbers: Floats, values: Floats) -> float:
    """Of two numbers Spearman's; of a number and a class 2 AUC - 1, so that a perfect order is 1."""
    from scipy.stats import spearmanr
    from sklearn.metrics import roc_auc_score

    is_number = np.isfinite(numbers)
    numbers, values = numbers[is_number], values[is_number]
    if len(numbers) < 20 or numbers.min() == numbers.max() or values.min() == values.max():
        return 0.0
    if len(np.unique(values)) == 2:
        return float(2 * roc_auc_score(values == values.max(), numbers) - 1)
    return float(spearmanr(numbers, values).statistic)


def many_or(count: int | None) -> str:
    """The number of distinct values as it is shown."""
    return f"> {MAX_DISTINCT}" if count is None else str(count)
