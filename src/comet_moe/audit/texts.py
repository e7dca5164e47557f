"""Texts with their groups, from a file: lines, JSON lines, or a table."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from comet_moe.exceptions import DataError, needs_extra
from comet_moe.files import describe, parse_json

JSON_LINES = (".jsonl", ".json")
TABLES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
"""Suffixes of files with columns; of any other file each line is a text."""


def read_texts(path: Path, text: str, group: str | None) -> Iterator[tuple[str, str]]:
    """The texts of a file with their groups: the lines of a .txt file, or the rows of a table.

    Args:
        path: a .txt, .jsonl, .csv, .tsv or .parquet file.
        text, group: names of columns; the group is "" without one.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder: give a file of texts")
    if not path.is_file():
        raise DataError(f"there is no file {path}: give a file of texts")
    if not path.stat().st_size:
        raise DataError(f"{path} is empty: give a file of texts")
    if path.suffix not in (*JSON_LINES, *TABLES) and group is not None:
        raise DataError(f"{path} has no columns, so no group {group}: give a .jsonl, .csv or .parquet file")
    try:
        if path.suffix in TABLES:
            yield from _read_table(path, text, group)
        else:
            with path.open(encoding="utf-8", newline="") as file:
                lines = iter(file)
                if path.suffix in JSON_LINES:
                    yield from _read_json_lines(lines, path, text, group)
                else:
                    yield from ((line, "") for line in lines)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8 ({error}): save it as UTF-8") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({describe(error)}): restore it") from error


def _read_json_lines(
    lines: Iterator[str], path: Path, text: str, group: str | None
) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = parse_json(
            line, f"line {number} of {path}", dict[str, Any], DataError, "give one object per line"
        )
        _require_columns(path, list(row), text, group)
        if not isinstance(row[text], str | None):
            raise DataError(
                f"the column {text} of {path} has {type(row[text]).__name__} in line {number}, not text: "
                "give one with --text"
            )
        if row[text] is not None:
            yield row[text], "" if group is None else str(row[group])


def _read_table(path: Path, text: str, group: str | None) -> Iterator[tuple[str, str]]:
    with needs_extra("cli", "reading a table of texts"):
        import pyarrow
        from pyarrow import csv, dataset, types

    try:
        kind: Any = TABLES[path.suffix]
        if path.suffix == ".tsv":
            kind = dataset.CsvFileFormat(csv.ParseOptions(delimiter="\t"))
        table = dataset.dataset(path, format=kind)
        columns = _require_columns(path, table.schema.names, text, group)
        for name in columns:
            own = table.schema.field(name).type
            own = own.value_type if types.is_dictionary(own) else own
            if types.is_binary(own):  # what Arrow makes of text in a CSV file that is not UTF-8
                raise DataError(f"the column {name} of {path} is not text in UTF-8: save it as UTF-8")
            if name == text and not (types.is_string(own) or types.is_large_string(own)):
                raise DataError(f"the column {name} of {path} has {own}, not text: give one with --text")
        for batch in table.to_batches(columns=columns):
            texts = batch.column(0).to_pylist()
            groups = [""] * len(texts) if group is None else map(str, batch.column(1).to_pylist())
            for one, of_group in zip(texts, groups, strict=True):
                if one is not None:
                    yield one, of_group
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} cannot be read ({describe(error)}): correct or convert it") from error


def _require_columns(path: Path, columns: Sequence[str], text: str, group: str | None) -> list[str]:
    """The columns of texts and of groups, which must be among ``columns``."""
    wanted = [text] if group is None else [text, group]
    for name in wanted:
        if name not in columns:
            raise DataError(f"{path} has no column {name}; its columns are {', '.join(columns)}")
    return wanted
