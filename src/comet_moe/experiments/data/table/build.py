"""``table``: the user's own table, with any columns and any tasks.

Four passes over the rows, each in bounded memory. The first looks at all columns and decides their kinds. The
second samples rows, for warnings and to find copies. The third learns vocabularies, bins and the scale of
targets from the train rows. The last encodes the rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.cache import Block, BlockwiseArray, RawDataset, RawSplit, Request
from comet_moe.experiments.data.splits import SPLITS
from comet_moe.experiments.data.table.encode import Encoder
from comet_moe.experiments.data.table.fit import SchemaFitter
from comet_moe.experiments.data.table.inspect import find_warnings
from comet_moe.experiments.data.table.roles import choose_features, choose_targets
from comet_moe.experiments.data.table.scan import scan_table
from comet_moe.experiments.data.table.schema import TableOptions, TableSchema
from comet_moe.experiments.data.table.source import TableSource, find_tables
from comet_moe.experiments.data.table.splits import Assign, plan_splits, require_single_values


def find_table_files(source: Path, options: Mapping[str, Any]) -> dict[str, Path]:
    """The files of a table by role: train.0, train.1, ..., and validation and test where they are given."""
    given = {"train": source, "validation": options["validation"], "test": options["test"]}
    return {
        f"{role}.{index}": file
        for role, path in given.items()
        if path is not None
        for index, file in enumerate(find_tables(Path(path).expanduser()))
    }


def build_table(files: Mapping[str, Path], request: Request) -> RawDataset:
    """Prepare the table in the given files, which are those of :func:`find_table_files`."""
    options = TableOptions.read(request.options)
    paths = {split: [path for role, path in files.items() if role.startswith(split)] for split in SPLITS}
    sources = {
        split: TableSource(own, options.encoding, options.separator, options.missing)
        for split, own in paths.items()
        if own
    }
    main = sources["train"]
    scans = scan_table(main)
    targets, target_notes = choose_targets(scans, options, main)
    features, feature_notes, unusable = choose_features(scans, options, targets, main, request.split)
    if options.gauc is not None:
        require_single_values(main, scans, "gauc", options.gauc)
    named = filter(None, (options.gauc, options.group, options.time, options.stratify))
    own = [*(feature.column for feature in features), *(target.column for target in targets)]
    columns = list(dict.fromkeys([*own, *named]))
    class_columns = [target.column for target in targets if target.classes]
    kinds = {own.column: own.kind for own in features}
    is_together = options.copies == "together" and request.split == "random"
    warnings, copies = find_warnings(main, scans, targets, kinds, unusable, is_together)
    make_assigners = plan_splits(
        sources, scans, options, request.split, request.seed, class_columns, copies if is_together else None
    )
    fitter = SchemaFitter(features, targets, options, request.seed)
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
    return RawDataset(
        [_empty_split(encoder, columns, count) for count in rows.values()],
        meta={
            "table": schema.model_dump(mode="json"),
            "warnings": warnings,
            "notes": [*notes, *target_notes, *feature_notes, *fitter.notes],
            **({"groups": groups} if groups else {}),
        },
        stream=partial(_encoded_blocks, sources, make_assigners, columns, encoder),
    )


def _empty_split(encoder: Encoder, columns: Sequence[str], rows: int) -> RawSplit:
    """The shapes and types of the arrays, as those that are encoded from no row at all."""
    batch = pa.RecordBatch.from_pylist([], pa.schema([(name, pa.string()) for name in columns]))
    features, targets = (
        {name: BlockwiseArray((rows, *array.shape[1:]), array.dtype) for name, array in arrays.items()}
        for arrays in (encoder.features(batch), encoder.targets(batch))
    )
    return RawSplit(features, targets)


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


def _assigned_batches(
    sources: Mapping[str, TableSource], assigners: Mapping[str, Assign], columns: Sequence[str]
) -> Iterator[tuple[pa.RecordBatch, Any]]:
    for name, source in sources.items():
        for batch in source.batches(columns):
            yield batch, assigners[name](batch)


def _encoded_blocks(
    sources: Mapping[str, TableSource],
    make_assigners: Callable[[], dict[str, Assign]],
    columns: Sequence[str],
    encoder: Encoder,
) -> Iterator[Block]:
    """Features and targets of blocks of rows, in the order of the files."""
    for batch, split in _assigned_batches(sources, make_assigners(), columns):
        encoded = {"features": encoder.features(batch), "targets": encoder.targets(batch)}
        for code, name in enumerate(SPLITS):
            rows = np.flatnonzero(split == code)
            for kind, arrays in encoded.items():
                for own, array in arrays.items() if len(rows) else ():
                    yield name, kind, own, array[rows]


def _check_train_targets(schema: TableSchema, source: TableSource, rows: int) -> None:
    for target in schema.targets:
        if target.missing == rows:
            raise DataError(f"{source} has no value of the target {target.name} in the train split.")
        if target.classes and sum(count > 0 for count in target.class_counts) < 2:
            raise DataError(
                f"{source} has one value only of the target {target.name} in the train split; use another "
                f"split or another target."
            )
