"""``table``: the user's own table, with any columns and any tasks.

Three passes over the rows, each in bounded memory: the first looks at all columns and decides their kinds,
the second learns vocabularies, bins and the scale of targets from the train rows, the third writes the
arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.splits import SPLITS
from comet_moe.experiments.data.table.encode import Encoder, select_rows
from comet_moe.experiments.data.table.fit import SchemaFitter
from comet_moe.experiments.data.table.options import TableOptions
from comet_moe.experiments.data.table.scan import ColumnScan, scan_table
from comet_moe.experiments.data.table.schema import TableSchema
from comet_moe.experiments.data.table.source import TableSource, find_tables
from comet_moe.experiments.data.table.splits import (
    Assign,
    count_groups,
    group_assigner,
    random_assigner,
    share_sizes,
    stratified_assigner,
    time_assigner,
)
from comet_moe.experiments.data.table.tasks import choose_features, choose_targets
from comet_moe.experiments.data.types import Array, Request, StreamedDataset


def find_table_files(source: Path, options: Mapping[str, Any]) -> dict[str, Path]:
    """The files of a table by role: train.0, train.1, ..., and validation and test where they are given."""
    given = {"train": source, "validation": options["validation"], "test": options["test"]}
    return {
        f"{role}.{index}": file
        for role, path in given.items()
        if path is not None
        for index, file in enumerate(find_tables(Path(path).expanduser()))
    }


def build_table(files: Mapping[str, Path], request: Request) -> StreamedDataset:
    """Prepare the table in the given files, which are those of :func:`find_table_files`."""
    options = TableOptions.read(request.options)
    sources = {split: _open(files, split, options) for split in SPLITS if f"{split}.0" in files}
    main = sources["train"]
    scans = scan_table(main)
    targets, target_notes = choose_targets(scans, options, main)
    features, feature_notes = choose_features(scans, options, targets, main, request.split)
    columns = list(
        dict.fromkeys(
            [
                *(feature.column for feature in features),
                *(target.column for target in targets),
                *filter(None, (options.gauc, options.group, options.time, options.stratify)),
            ]
        )
    )
    if options.gauc is not None:
        _require_column(main, scans, "gauc", options.gauc)
    make_assigners = _plan_splits(
        sources, scans, columns, options, request, [t.column for t in targets if t.classes]
    )
    fitter = SchemaFitter(
        features,
        targets,
        seed=request.seed,
        min_count=options.min_count,
        max_categories=options.max_categories,
        bins=options.bins,
        list_separator=options.list_separator,
        list_length=options.list_length,
    )
    rows = dict.fromkeys(SPLITS, 0)
    for batch, split in _assigned_batches(sources, make_assigners(), columns):
        for code, name in enumerate(SPLITS):
            rows[name] += int((split == code).sum())
        fitter.add(batch.filter(pa.array(split == 0)))
    for name, count in rows.items():
        if not count:
            raise DataError(f"{main} leaves no row for the {name} split; give more rows or other shares.")
    schema = TableSchema(
        features=fitter.fitted_features(),
        targets=fitter.fitted_targets(),
        key=options.key,
        gauc=options.gauc,
        list_separator=options.list_separator,
    )
    _check_train_targets(schema, main, rows["train"])
    groups = _group_labels(schema, options.groups, main)
    encoder = Encoder(schema)
    notes = [note for source in sources.values() for note in source.notes]
    return StreamedDataset(
        rows=rows,
        features=encoder.shapes(),
        targets={target.name: ((), np.dtype(np.float32)) for target in schema.targets},
        make_blocks=partial(_encoded_blocks, sources, make_assigners, columns, encoder),
        meta={
            "table": schema.model_dump(mode="json"),
            "notes": [*notes, *target_notes, *feature_notes, *fitter.notes],
            **({"groups": groups} if groups else {}),
        },
    )


def _group_labels(schema: TableSchema, names: Sequence[str], source: object) -> dict[str, list[str]]:
    """For each of the features ``names``, the labels of its codes; DataError for one that has no codes."""
    categories = {feature.name: feature.categories for feature in schema.of_kind("categorical")}
    for name in names:
        if name not in categories:
            raise DataError(
                f"{source} cannot group rows by {name}, which the option groups names; choose among the "
                f"categorical features {', '.join(categories) or '(there are none)'}."
            )
    return {name: ["missing", "unknown", "rare", *categories[name]] for name in names}


def _open(files: Mapping[str, Path], split: str, options: TableOptions) -> TableSource:
    paths = [path for role, path in files.items() if role.startswith(f"{split}.")]
    return TableSource(paths, options.encoding, options.separator, options.missing)


def _plan_splits(
    sources: Mapping[str, TableSource],
    scans: Mapping[str, ColumnScan],
    columns: Sequence[str],
    options: TableOptions,
    request: Request,
    classes: Sequence[str],
) -> Any:
    """A function that makes, for a new pass, what assigns the rows of each source to splits."""
    main, seed = sources["train"], request.seed
    shares = [
        share if name == "train" or name not in sources else 0.0
        for name, share in zip(SPLITS, options.shares, strict=True)
    ]
    rows = next(iter(scans.values())).rows
    empty = [
        name
        for name, size, share in zip(SPLITS, share_sizes(rows, shares), shares, strict=True)
        if share > 0 and not size
    ]
    if empty:
        raise DataError(
            f"{main} has {rows} rows, which leave none for the {empty[0]} split; give more rows or other "
            f"shares."
        )
    split = request.split
    make: Callable[[], Assign]
    if split == "random":
        make = partial(random_assigner, rows, shares, seed)
    elif split == "stratified":
        column = options.stratify or next(iter(classes), None)
        if column is None:
            raise DataError("a stratified split needs the option stratify, the name of a column of classes.")
        main_columns = _require_column(main, scans, "stratify", column)
        if scans[column].has_many or (not scans[column].texts and not scans[column].is_integer):
            raise DataError(
                f"{main} has numbers or too many values in column {column}, by which the rows are to be "
                f"stratified; give a column of classes with the option stratify, or split at random."
            )
        make = partial(
            stratified_assigner, column, count_groups(main.batches(main_columns), column), shares, seed
        )
    elif split == "group":
        if options.group is None:
            raise DataError("a split by group needs the option group, the name of a column.")
        main_columns = _require_column(main, scans, "group", options.group)
        groups = count_groups(main.batches(main_columns), options.group)
        make = partial(group_assigner, options.group, groups, shares, seed, main)
    else:
        if options.time is None:
            raise DataError("a split by time needs the option time, the name of a column.")
        main_columns = _require_column(main, scans, "time", options.time)
        by_time = time_assigner(main.batches(main_columns), options.time, shares, seed, main)
        make = lambda: by_time  # noqa: E731 - the same in every pass, as it holds no state

    def make_assigners() -> dict[str, Assign]:
        fixed = {"validation": 1, "test": 2}
        return {name: make() if name == "train" else partial(_constant, fixed[name]) for name in sources}

    return make_assigners


def _constant(code: int, batch: pa.RecordBatch) -> Any:
    return np.full(batch.num_rows, code, dtype=np.int8)


def _require_column(
    source: TableSource, scans: Mapping[str, ColumnScan], option: str, column: str
) -> list[str]:
    if column not in source.columns:
        raise DataError(
            f"{source} has no column {column}, which the option {option} names; its columns are "
            f"{', '.join(source.columns)}."
        )
    if scans[column].is_list or not scans[column].is_readable:
        raise DataError(
            f"{source} has lists or bytes in column {column}, which the option {option} names; name a column "
            f"of single values."
        )
    return [column]


def _assigned_batches(
    sources: Mapping[str, TableSource], assigners: Mapping[str, Assign], columns: Sequence[str]
) -> Iterator[tuple[pa.RecordBatch, Any]]:
    for name, source in sources.items():
        for batch in source.batches(columns):
            yield batch, assigners[name](batch)


def _encoded_blocks(
    sources: Mapping[str, TableSource], make_assigners: Any, columns: Sequence[str], encoder: Encoder
) -> Iterator[tuple[str, dict[str, Array], dict[str, Array]]]:
    """Split, features and targets of blocks of rows, in the order of the files."""
    for batch, split in _assigned_batches(sources, make_assigners(), columns):
        features, targets = encoder.features(batch), encoder.targets(batch)
        for code, name in enumerate(SPLITS):
            rows = np.flatnonzero(split == code)
            if len(rows):
                yield name, select_rows(features, rows), select_rows(targets, rows)


def _check_train_targets(schema: TableSchema, source: TableSource, rows: int) -> None:
    for target in schema.targets:
        if target.missing == rows:
            raise DataError(f"{source} has no value of the target {target.name} in the train split.")
        if target.classes and sum(count > 0 for count in target.class_counts) < 2:
            raise DataError(
                f"{source} has one value only of the target {target.name} in the train split; use another "
                f"split or another target."
            )
