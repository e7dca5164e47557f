"""A table in one or several files (.csv, .tsv, .parquet), streamed in batches of rows by Arrow.

Encoding and separator of text files are guessed where that is safe, and the guess is told in ``notes``:
UTF-16 by its byte order mark, commas, semicolons, tabs or vertical bars by the first line, and commas as
decimal points by the first rows of a file with semicolons.
"""

from __future__ import annotations

import codecs
import csv as python_csv
import glob
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.raw_files import wrap_read_errors
from comet_moe.experiments.data.table.files import (
    SEPARATORS,
    Header,
    inspect_parquet,
    make_text_options,
    read_header,
    rephrase_error,
    require_distinct_columns,
    require_empty_end,
    suffix_of,
)

SUFFIXES = (".csv", ".tsv", ".parquet")
BATCH_ROWS = 2**16
"""Most rows of a batch."""

MISSING_TEXTS = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "<NA>", "#N/A")
"""Texts of a CSV or TSV file that stand for a missing value."""

_OTHER_ENCODING = "save it as UTF-8, or name its encoding, such as cp1252, by the option encoding"
_BLOCKS = 8  # of a text file that make a batch
_BUFFER = 2**20
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def find_tables(path: Path) -> list[Path]:
    """The files that ``path`` names: a file, a folder of tables, or a glob pattern such as data/*.csv."""
    if path.is_file():
        if suffix_of(path) not in SUFFIXES:
            raise DataError(f"{path} ends in {path.suffix!r}; give a .csv, .tsv or .parquet table.")
        return [path]
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if file.is_file() and suffix_of(file) in SUFFIXES]
        if not found:
            raise DataError(f"{path} has no .csv, .tsv or .parquet file; give a folder that holds one.")
        return found
    found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
    if not found:
        raise DataError(
            f"{path} does not exist; give a table, a folder of tables or a pattern such as *.csv."
        )
    wrong = next((file for file in found if suffix_of(file) not in SUFFIXES), None)
    if wrong is not None:
        raise DataError(f"{path} names {wrong}, which is not a .csv, .tsv or .parquet table; narrow it.")
    return found


class TableSource:
    """The rows of one or several files with the same columns, in the order of the files.

    Args:
        paths: the files; those after the first may have their columns in another order.
        encoding: of text files, by Python's name; None: UTF-8, or UTF-16 if the file has its mark.
        separator: between the values of a text file; None: guessed from the first line.
        missing: texts that stand for a missing value.

    Attributes:
        columns: the names of all columns, in the order of the first file.
        notes: what was guessed, one sentence each.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        encoding: str | None = None,
        separator: str | None = None,
        missing: Sequence[str] = MISSING_TEXTS,
    ):
        self.paths = list(paths)
        self.notes: list[str] = []
        self._missing = list(missing)
        self._has_decimal_comma: set[Path] = set()
        self._headers: dict[Path, Header] = {}
        self._schemas: dict[Path, pa.Schema] = {}
        for path in self.paths:
            if suffix_of(path) == ".parquet":
                self._schemas[path] = inspect_parquet(path)
            else:
                self._headers[path] = self._open_header(path, encoding, separator)
        self.columns = self._names(self.paths[0])
        for path in self.paths:
            require_distinct_columns(path, self.columns, self._names(path))

    def __str__(self) -> str:
        if len(self.paths) == 1:
            return str(self.paths[0])
        return f"{self.paths[0].parent} ({len(self.paths)} files)"

    def _names(self, path: Path) -> list[str]:
        return list(self._headers[path].names if path in self._headers else self._schemas[path].names)

    def _open_header(self, path: Path, encoding: str | None, separator: str | None) -> Header:
        if encoding is None:
            with wrap_read_errors(path, "file"), path.open("rb") as file:
                mark = file.read(3)
            encoding = "utf-16" if mark.startswith(_UTF16_MARKS) else "utf-8"
            if encoding == "utf-16":
                self.notes.append(f"{path.name} is read as UTF-16, by its byte order mark")
            elif mark == codecs.BOM_UTF8:
                self.notes.append(f"{path.name} begins with a byte order mark, which is skipped")
        else:
            try:
                codecs.lookup(encoding)
            except LookupError as error:
                raise DataError(f"option encoding is {encoding!r}; give a name such as cp1252.") from error
        header = read_header(path, encoding, separator, _OTHER_ENCODING)
        usual = "\t" if suffix_of(path) == ".tsv" else ","
        if separator is None and header.separator != usual:
            name = SEPARATORS[header.separator]
            self.notes.append(f"{path.name} is read with {name} between its values, as in its first line")
        if header.separator == ";" and _has_decimal_comma(path, header):
            self._has_decimal_comma.add(path)
            self.notes.append(f"{path.name} is read with commas as decimal points, as in its first rows")
        return header

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows once, at most ``BATCH_ROWS`` at a time, with the given columns in the given order.

        Columns of text files are strings, those of Parquet files have the file's types. Memory stays bounded.
        """
        wanted = self.columns if columns is None else list(columns)
        for path in self.paths:
            yield from self._file_batches(path, wanted)

    def _file_batches(self, path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
        require_distinct_columns(path, columns, self._names(path))
        header = self._headers.get(path)
        kind = "Parquet file" if header is None else f"{header.encoding.upper()} table"
        batches = (
            self._parquet_batches(path, columns) if header is None else self._text_batches(path, columns)
        )
        while True:
            with wrap_read_errors(path, kind):
                try:
                    batch = next(batches, None)
                except pa.ArrowInvalid as error:
                    message = (
                        None if header is None else rephrase_error(path, header, str(error), _OTHER_ENCODING)
                    )
                    if message is None:
                        raise
                    raise DataError(message) from error
            if batch is None:
                return
            if batch.num_rows:
                yield batch.select(columns)

    # Arrow's data sets read a file ahead of a slow reader until all of it is in memory; these two do not.

    def _parquet_batches(self, path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
        file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER)
        yield from file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False)

    def _text_batches(self, path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
        header = self._headers[path]
        columns = [*columns, header.trailing_name] if header.has_trailing_separator else columns
        schema = pa.schema([(name, pa.string()) for name in columns])
        reading, parsing, converting = make_text_options(header, schema, self._missing)
        reading.use_threads = False
        converting.include_columns = columns
        first_row = 1
        # Arrow reads up to 32 blocks ahead: they are small, and put together, since each batch has its cost.
        waiting: list[pa.RecordBatch] = []
        for batch in csv.open_csv(path, reading, parsing, converting):
            require_empty_end(path, header, batch, first_row)
            first_row += batch.num_rows
            waiting.append(batch)
            rows = sum(own.num_rows for own in waiting)
            if rows + batch.num_rows > BATCH_ROWS or len(waiting) == _BLOCKS:
                yield self._joined(path, waiting)
                waiting = []
        if waiting:
            yield self._joined(path, waiting)

    def _joined(self, path: Path, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        joined = pa.concat_batches(batches)
        if path not in self._has_decimal_comma:
            return joined
        columns = [
            pc.replace_substring_regex(column, r"^(-?\d+),(\d+)$", r"\1.\2") for column in joined.columns
        ]
        return pa.record_batch(columns, names=joined.schema.names)


def _has_decimal_comma(path: Path, header: Header) -> bool:
    """Whether one of the first values is a number with a comma, such as 1,5."""
    with path.open(encoding=header.encoding, errors="replace", newline="") as file:
        rows = python_csv.reader(file, delimiter=header.separator)
        return any(_DECIMAL_COMMA.fullmatch(value.strip()) for row in islice(rows, 1000) for value in row)
