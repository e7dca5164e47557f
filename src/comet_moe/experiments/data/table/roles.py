"""Which columns of a table become features and targets, and of which kind."""

import re
from collections.abc import Mapping, Sequence

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.raw_files import require_columns
from comet_moe.experiments.data.table.scan import MAX_DISTINCT, ColumnScan, sort_classes
from comet_moe.experiments.data.table.schema import (
    ColumnKind,
    Feature,
    TableOptions,
    Target,
    TargetKind,
    TargetOption,
)
from comet_moe.experiments.data.table.values import DATE_PARTS

LARGEST_TARGET = 1e100
FEW_CLASSES = 10
"""A target of integers with at most this many distinct values is read as classes."""
FEW_INTEGERS = 20
"""A column of integers with at most this many distinct values is read as categories."""
MIXED_SHARE = 0.9
"""A text in a column with at least this share of numbers is taken for a mistake."""

_ID_NAME = re.compile(r"(^|[_\s-])(id|uuid|guid|key|code|zip|zipcode)$|[a-z]I[dD]$", re.IGNORECASE)
_ID_ALONE = re.compile(r"(^|[_\s-])(id|uuid|guid)$|[a-z]I[dD]$|^(unnamed: 0|index|)$", re.IGNORECASE)


def choose_targets(
    scans: Mapping[str, ColumnScan], options: TableOptions, source: object
) -> tuple[list[Target], list[str]]:
    """The targets that the options name, with their kinds and classes, and notes on what was inferred."""
    targets, notes = [], []
    for name, option in options.targets.items():
        column = option.column or name
        require_columns(source, [column], scans, ", which is to be a target")
        scan = scans[column]
        _check_target(scan, name, source)
        kind = option.kind or _infer_target_kind(scan, option)
        if option.kind is None:
            notes.append(f"target {name} is read as {kind}")
        if kind in ("regression", "count"):
            notes += describe_written(scan)
        targets.append(_make_target(scan, name, option, kind, source))
    return targets, notes


def describe_written(scan: ColumnScan) -> list[str]:
    """How the numbers of a column are read if they have separators or units; empty if they have none."""
    if scan.number.written is None:
        return []
    text, number = scan.number.written
    return [f"column {scan.name} has numbers such as {text!r}, which is read as {number:.12g}"]


def _check_target(scan: ColumnScan, name: str, source: object) -> None:
    if not scan.values:
        raise DataError(f"{source} has no value of the target {name}; all {scan.rows:,} rows are empty.")
    if scan.is_list or not scan.is_readable:
        raise DataError(f"{source} has lists or bytes as target {name}; a target is a number or a class.")
    if len(scan.counts) < 2:
        value = next(iter(scan.counts))
        raise DataError(
            f"{source} has one value only, {value!r}, as target {name}; there is nothing to predict."
        )
    if scan.number.infinite:
        raise DataError(
            f"{source} has {scan.number.infinite:,} infinite values as target {name}; correct or remove them."
        )


def _infer_target_kind(scan: ColumnScan, option: TargetOption) -> TargetKind:
    if option.positive is not None or len(scan.counts) == 2:
        return "binary"
    if not scan.number.texts and (not scan.number.is_integer or len(scan.counts) > FEW_CLASSES):
        return "regression"
    return "multiclass"


def _make_target(
    scan: ColumnScan, name: str, option: TargetOption, kind: TargetKind, source: object
) -> Target:
    target = Target(name=name, column=scan.name, kind=kind, decimal=scan.number.decimal)
    if kind in ("regression", "count"):
        if scan.number.texts and scan.number.first_text is not None:
            text, row = scan.number.first_text
            raise DataError(
                f"{source} has {text!r} in column {scan.name}, data row {row}; a target of kind {kind} must "
                f"be a number or empty."
            )
        if max(-scan.number.low, scan.number.high) > LARGEST_TARGET:
            raise DataError(
                f"{source} has numbers above {LARGEST_TARGET:g} as target {name}, too large to square; give "
                f"it in a larger unit."
            )
        if kind == "count" and (scan.number.low < 0 or not scan.number.is_integer):
            raise DataError(
                f"{source} has {scan.number.low:g} as target {name}; counts are integers of at least 0, "
                f"other numbers are of kind regression."
            )
        return target
    classes = sort_classes(scan.counts)
    if scan.number.numbers and scan.number.texts and option.positive is None:
        text, row = scan.number.first_text or ("", 0)
        raise DataError(
            f"{source} has numbers and texts such as {text!r} (data row {row}) as target {name}; give all "
            f"classes as texts or all as numbers."
        )
    if option.positive is not None:
        if option.positive not in classes:
            raise DataError(
                f"{source} has no value {option.positive!r} in column {scan.name}; its values are "
                f"{_shorten(classes)}."
            )
        return target.model_copy(
            update={"classes": [f"not {option.positive}", option.positive], "positive": option.positive}
        )
    is_large = len(classes) > MAX_DISTINCT
    many = f"more than {MAX_DISTINCT:,}" if is_large else f"{len(classes):,}"
    if kind == "binary" and len(classes) != 2:
        other = "regression" if is_large and scan.number.numbers else "multiclass"
        raise DataError(
            f"{source} has {many} distinct values as target {name}, where a binary one has 2; choose the "
            f"kind {other}, or in a recipe one class, {name}: {{kind: binary, positive: {classes[-1]}}}."
        )
    if kind == "multiclass" and (is_large or 2 * len(classes) > scan.values):
        raise DataError(
            f"{source} has {many} classes as target {name} in {scan.values:,} rows, too many to learn; "
            f"choose the kind regression, or another column."
        )
    return target.model_copy(update={"classes": classes})


def choose_features(
    scans: Mapping[str, ColumnScan],
    options: TableOptions,
    targets: Sequence[Target],
    source: object,
    split: str,
) -> tuple[list[Feature], list[str], dict[str, str]]:
    """The features of all columns that are neither targets nor left out.

    Returns:
        The features; notes on how columns are read; the reason for each column that is left out though the
        options do not say so.
    """
    for option in ("columns", "exclude", "features", "groups", "gauc", "key"):
        names = getattr(options, option) or []
        names = [names] if isinstance(names, str) else names
        require_columns(source, names, scans, f", which the option {option} names")
    target_columns = {target.column for target in targets}
    used = {*options.columns, *(options.features or [])}
    for name in sorted(target_columns & used):
        raise DataError(f"the column {name} is a target and cannot be a feature; remove one of them.")
    for name in options.exclude:
        if name in target_columns | used:
            role = "target" if name in target_columns else "feature"
            raise DataError(f"the column {name} is a {role} and cannot be excluded; remove one of them.")
    left_out = {*options.exclude, *target_columns}
    roles = {"group": options.group, "time": options.time}
    if split in roles and roles[split] not in options.columns:
        left_out.add(roles[split] or "")
    features: list[Feature] = []
    notes: list[str] = []
    unusable: dict[str, str] = {}
    for name, scan in scans.items():
        if name in left_out or (options.features is not None and name not in options.features):
            continue
        kind = options.columns.get(name)
        if kind is None and name in (options.key, *options.groups):
            kind = "categorical"
        if kind is None:
            kind, reason = infer_kind(scan, source)
        if kind is None:
            unusable[name] = reason or ""
            continue
        _check_kind(scan, kind, source)
        if kind == "numeric" and scan.number.texts:
            assert scan.number.first_text is not None
            notes.append(
                f"column {name} has {scan.number.texts:,} texts that are not numbers and count as missing, "
                f"the first is {scan.number.first_text[0]!r} in data row {scan.number.first_text[1]}"
            )
        if kind == "numeric":
            notes += describe_written(scan)
        features += _make_features(scan, kind)
    if not features:
        raise DataError(f"{source} has no column left as a feature; give at least one besides the targets.")
    return features, notes, unusable


def infer_kind(scan: ColumnScan, source: object) -> tuple[ColumnKind | None, str | None]:
    """The kind of a feature, or None and the reason to leave the column out.

    Raises DataError where numbers and texts are mixed in a way that is probably a mistake.
    """
    if not scan.is_readable:
        return None, "its type is neither number, text, date, truth value nor list"
    if not scan.values:
        return None, "it has no value"
    if len(scan.counts) == 1 and not scan.missing:
        return None, f"it has one value only, {next(iter(scan.counts))!r}"
    if scan.is_list:
        return "list", None
    if scan.is_date:
        return "date", None
    if scan.number.numbers and not scan.number.texts:
        return _infer_number(scan)
    is_code = scan.is_padded or bool(_ID_NAME.search(scan.name))
    is_mixed = scan.number.numbers >= MIXED_SHARE * scan.values and len(scan.counts) > FEW_INTEGERS
    if is_mixed and not is_code and scan.number.first_text is not None:
        text, row = scan.number.first_text
        raise DataError(
            f"{source} has {text!r} in column {scan.name}, data row {row}, where {scan.number.numbers:,} of "
            f"{scan.values:,} values are numbers; correct it, or set the option columns.{scan.name} to "
            f"numeric (texts then count as missing) or categorical."
        )
    if scan.is_prose and not is_code:
        return "text", None
    if scan.identifies_rows:
        return None, "nearly every row has a text of its own"
    return "categorical", None


def _infer_number(scan: ColumnScan) -> tuple[ColumnKind | None, str | None]:
    if not scan.number.is_integer:
        return "numeric", None
    if _ID_ALONE.search(scan.name) and scan.identifies_rows:
        return None, "nearly every row has an id of its own"
    if scan.is_row_number:
        return None, "it numbers the rows"
    is_code = scan.is_padded or bool(_ID_NAME.search(scan.name))
    return ("categorical" if is_code or len(scan.counts) <= FEW_INTEGERS else "numeric"), None


def _check_kind(scan: ColumnScan, kind: str, source: object) -> None:
    """Raise DataError if the values of a column cannot be of the kind that the options ask for."""
    if not scan.is_readable:
        reason = "of a type that is neither number, text, date, truth value nor list"
    elif scan.is_list and kind != "list":
        reason = "that are lists"
    elif kind == "date" and not scan.is_date and scan.values:
        reason = "that are not dates such as 2024-01-31"
    elif kind == "numeric" and scan.values and not scan.number.numbers and not scan.is_date:
        reason = f"such as {next(iter(sorted(scan.counts)))!r} and no number"
    else:
        return
    raise DataError(
        f"{source} has values {reason} in column {scan.name}, which the option columns calls {kind}; choose "
        f"another kind, or exclude the column."
    )


def _make_features(scan: ColumnScan, kind: str) -> list[Feature]:
    name = scan.name
    if kind != "date":
        decimal = scan.number.decimal if kind == "numeric" else "."
        return [Feature.model_validate({"name": name, "column": name, "kind": kind, "decimal": decimal})]
    kinds = {part: "numeric" if part == "days" else "categorical" for part in DATE_PARTS}
    return [
        Feature.model_validate({"name": f"{name}.{part}", "column": name, "kind": own, "part": part})
        for part, own in kinds.items()
    ]


def _shorten(texts: Sequence[str]) -> str:
    return ", ".join(texts[:FEW_INTEGERS]) + (", ..." if len(texts) > FEW_INTEGERS else "")
