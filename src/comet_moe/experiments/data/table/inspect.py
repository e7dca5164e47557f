"""A look at a table before training: its columns with their kinds, and warnings about misleading ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.table.copies import MAX_KEYS, Copies, RowSample, sample_rows
from comet_moe.experiments.data.table.leaks import find_leaks
from comet_moe.experiments.data.table.roles import choose_targets, describe_written, infer_kind
from comet_moe.experiments.data.table.scan import MAX_DISTINCT, ColumnScan, scan_table
from comet_moe.experiments.data.table.schema import TableOptions, Target
from comet_moe.experiments.data.table.source import TableSource, find_tables


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
    features = {column.name: column.kind or "" for column in columns if column.role == "feature"}
    for name in features:
        notes += describe_written(scans[name]) if features[name] == "numeric" else []
    compared = [*features, *(target.column for target in targets)]
    if compared:
        others = {name: "" for name, scan in scans.items() if scan.identifies_rows and not scan.number.texts}
        sample = sample_rows(source, compared, list(others), next(iter(scans.values())).rows)
        warnings += find_warnings(sample, scans, targets, others | features, read.copies == "together")
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
    date = describe_dates(scan, None) if role == "left out" and not is_excluded else None
    if date is not None:
        warnings.append(date)
    elif role == "left out" and not is_excluded and len(scan.counts) <= 1 and scan.is_readable:
        warnings.append(f"column {scan.name} is constant and left out: {reason}.")
    distinct = None if scan.has_many else len(scan.counts)
    examples = sorted(scan.counts, key=lambda text: (-scan.counts[text], text))[:3]
    return ColumnReport(
        scan.name, role, kind, scan.missing / scan.rows, distinct, [text[:40] for text in examples], reason
    )


def describe_copies(copies: Copies | None, rows: int, are_together: bool) -> list[str]:
    """A warning about rows that are copies of others, if there are any."""
    if copies is None:
        return []
    many = f"{copies.count:,} of {rows:,} rows"
    if rows > MAX_KEYS:
        many = f"about {many}"
    if are_together:
        return [f"{many} are copies of others: all copies of a row are in one split."]
    return [f"{many} are copies of others, which may be in several splits: remove them."]


def describe_dates(scan: ColumnScan, kind: str | None) -> str | None:
    """A warning about dates in a form that is not understood; ``kind`` is that of a feature."""
    if not scan.looks_like_date or scan.is_date or not scan.number.texts:
        return None
    return (
        f"column {scan.name} looks like dates, such as {next(iter(sorted(scan.counts)))!r}, but is "
        f"{'left out' if kind is None else f'read as {kind}'}: write them as 2024-01-31 for parts of dates."
    )


def find_warnings(
    sample: RowSample,
    scans: Mapping[str, ColumnScan],
    targets: Sequence[Target],
    features: Mapping[str, str],
    are_together: bool,
) -> list[str]:
    """What misleads in a table: copies of rows, columns that give a target away, dates that are texts.

    Args:
        sample: of its rows.
        scans: of all columns.
        targets: its targets.
        features: kind of each column that is a feature.
        are_together: whether all copies of a row are in one split.
    """
    dates = (describe_dates(scans[name], kind) for name, kind in features.items())
    return [
        *describe_copies(sample.copies, next(iter(scans.values())).rows, are_together),
        *find_leaks(sample.table, scans, targets, list(features)),
        *filter(None, dates),
    ]


def many_or(count: int | None) -> str:
    """The number of distinct values as it is shown."""
    return f"> {MAX_DISTINCT}" if count is None else str(count)
