"""A look at a table before training: its columns with their kinds, and warnings about misleading ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.table.copies import MAX_KEYS, Copies, sample_rows
from comet_moe.experiments.data.table.leaks import find_leaks
from comet_moe.experiments.data.table.roles import choose_targets, describe_written, infer_kind
from comet_moe.experiments.data.table.scan import MAX_DISTINCT, ColumnScan, scan_table
from comet_moe.experiments.data.table.schema import TableOptions, Target
from comet_moe.experiments.data.table.source import TableSource, find_tables

EXCLUDED, MIXED = "by the option exclude", "numbers and texts are mixed"
MOST_SHOWN = 20
"""Columns that are left out and have a line of their own."""


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
    mixed: list[str] = []
    columns = [_report_column(scan, read, targets, source, mixed) for scan in scans.values()]
    features = {column.name: column.kind or "" for column in columns if column.role == "feature"}
    unusable = {
        column.name: column.reason or ""
        for column in columns
        if column.role == "left out" and column.reason not in (EXCLUDED, MIXED)
    }
    for name in features:
        notes += describe_written(scans[name]) if features[name] == "numeric" else []
    warnings, _ = find_warnings(source, scans, targets, features, unusable, read.copies == "together")
    rows = next(iter(scans.values())).rows
    files = [str(file) for file in source.paths]
    return TableReport(files, rows, columns, [*mixed, *warnings], [*source.notes, *notes])


def _report_column(
    scan: ColumnScan,
    options: TableOptions,
    targets: Sequence[Target],
    source: TableSource,
    mixed: list[str],
) -> ColumnReport:
    """The report of a column; an error about numbers and texts in it is appended to ``mixed``."""
    role, reason = "feature", None
    target = next((target for target in targets if target.column == scan.name), None)
    kind: str | None = options.columns.get(scan.name)
    if target is not None:
        role, kind = "target", target.kind
    elif scan.name in options.exclude:
        role, reason = "left out", EXCLUDED
    elif kind is None:
        try:
            kind, reason = infer_kind(scan, source)
        except DataError as error:
            mixed.append(str(error))
            kind, reason = None, MIXED
        role = "feature" if kind is not None else "left out"
    distinct = None if scan.has_many else len(scan.counts)
    examples = sorted(scan.counts, key=lambda text: (-scan.counts[text], text))[:3]
    return ColumnReport(
        scan.name, role, kind, scan.missing / scan.rows, distinct, [text[:40] for text in examples], reason
    )


def find_warnings(
    source: TableSource,
    scans: Mapping[str, ColumnScan],
    targets: Sequence[Target],
    features: Mapping[str, str],
    unusable: Mapping[str, str],
    keeps_copies: bool,
) -> tuple[list[str], Copies | None]:
    """What misleads in a table, and the copies of rows in it; reads its rows once.

    Args:
        source: the table.
        scans: of all columns.
        targets: its targets.
        features: kind of each column that is a feature.
        unusable: the reason for each column that is left out though the user did not say so.
        keeps_copies: whether all copies of a row are in one split.
    """
    rows = next(iter(scans.values())).rows
    compared = [*features, *(target.column for target in targets)]
    ids = [name for name in unusable if scans[name].identifies_rows and not scans[name].number.texts]
    if not compared:
        return describe_unusable(scans, unusable), None
    sample = sample_rows(source, list(dict.fromkeys(compared)), ids, rows)
    dates = (describe_dates(scans[name], kind) for name, kind in features.items())
    return [
        *_describe_copies(sample.copies, rows, keeps_copies),
        *find_leaks(sample.table, scans, targets, [*ids, *features]),
        *filter(None, dates),
        *describe_unusable(scans, unusable),
    ], sample.copies


def _describe_copies(copies: Copies | None, rows: int, are_together: bool) -> list[str]:
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


def describe_unusable(scans: Mapping[str, ColumnScan], unusable: Mapping[str, str]) -> list[str]:
    """A warning about each column that is left out, or one for the rest where there are many."""
    shown = list(unusable)[: None if len(unusable) <= MOST_SHOWN + 1 else MOST_SHOWN]
    lines = [
        describe_dates(scans[name], None) or f"column {name} is left out: {unusable[name]}." for name in shown
    ]
    others = [name for name in unusable if name not in shown]
    if others:
        names = ", ".join(others[:MOST_SHOWN])
        lines.append(f"{len(others):,} other columns are left out for such reasons: {names}, ...")
    return lines


def many_or(count: int | None) -> str:
    """The number of distinct values as it is shown."""
    return f"> {MAX_DISTINCT}" if count is None else str(count)
