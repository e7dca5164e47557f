"""A table in one or several files (.csv, .tsv, .parquet), streamed in batches of rows by Arrow.

Text files may be compressed, as .csv.gz or .csv.zst.
"""

import glob
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.raw_files import (
    require_columns,
    require_fitting,
    require_rows,
    wrap_read_errors,
)
from comet_moe.experiments.data.table.schema import MISSING_TEXTS
from comet_moe.experiments.data.table.text_file import BATCH_ROWS, TextFile, table_suffix

SUFFIXES = (".csv", ".tsv", ".parquet")
SPREADSHEETS = (".xlsx", ".xls", ".xlsm", ".ods")
ROW_BYTES = 400
"""Memory that a row of ratings needs until it is prepared, about: ids, hash tables, unrated pairs, splits."""

_BUFFER = 2**20


def find_tables(path: Path) -> list[Path]:
    """The files that ``path`` names: a file, a folder of tables, or a glob pattern such as data/*.csv."""
    if path.is_file():
        _require_suffix(path)
        return [path]
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if file.is_file() and _is_table(file)]
        if not found:
            raise DataError(f"{path} has no .csv, .tsv or .parquet file; give a folder that holds one.")
        return found
    found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
    if not found:
        raise DataError(
            f"{path} does not exist; give a table, a folder of tables or a pattern such as *.csv."
        )
    for file in found:
        if not _is_table(file):
            raise DataError(f"{path} names {file}, which is not a .csv, .tsv or .parquet table; narrow it.")
    return found


def _is_table(path: Path) -> bool:
    return table_suffix(path) in SUFFIXES


def _require_suffix(path: Path) -> None:
    if path.suffix.lower() in SPREADSHEETS:
        raise DataError(
            f"{path} is a spreadsheet; save its sheet as .csv (UTF-8), or write it with pandas: "
            f"read_excel({path.name!r}).to_parquet({path.stem + '.parquet'!r})."
        )
    if not _is_table(path):
        raise DataError(
            f"{path} ends in {path.suffix!r}; give a .csv, .tsv or .parquet table, or a compressed one such "
            f"as .csv.gz."
        )


class _ParquetFile:
    """One Parquet file of a table; the same interface as that of ``TextFile``."""

    kind, has_decimal_comma = "Parquet file", False

    def __init__(self, path: Path):
        self.path = path
        self.notes: list[str] = []
        with wrap_read_errors(path, self.kind):
            with path.open("rb"):  # unlike Arrow's, this error has the reason why a file cannot be opened
                pass
            self.names: list[str] = parquet.read_schema(path).names

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows in order, with the types of the file."""
        # Arrow's data sets read a file ahead of a slow reader until all of it is in memory; this does not.
        file = parquet.ParquetFile(self.path, pre_buffer=False, buffer_size=_BUFFER)
        yield from file.iter_batches(BATCH_ROWS, columns=list(columns), use_threads=False)

    def rephrase(self, error: pa.ArrowInvalid) -> None:
        """Arrow's message is about the file, not about a row."""
        return


def _open(
    path: Path, encoding: str | None, separator: str | None = None, missing: Sequence[str] = ("",)
) -> TextFile | _ParquetFile:
    _require_suffix(path)
    if path.suffix.lower() == ".parquet":
        return _ParquetFile(path)
    return TextFile(path, encoding, separator, missing)


class TableSource:
    """The rows of one or several files with the same columns, in the order of the files.

    Args:
        paths: the files; those after the first may have their columns in another order.
        encoding: of text files, by Python's name; None: UTF-8, or UTF-16 if the file has its mark.
        separator: of text files; None: a tab for .tsv, else the most frequent of ``SEPARATORS`` in line 1.
        missing: texts that stand for a missing value.

    Attributes:
        columns: the names of all columns, in the order of the first file.
        notes: what was guessed, one sentence each.
        has_decimal_comma: whether numbers are probably written with a comma, such as 1,5.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        encoding: str | None = None,
        separator: str | None = None,
        missing: Sequence[str] = MISSING_TEXTS,
    ):
        self.paths = list(paths)
        self._files = [_open(path, encoding, separator, missing) for path in self.paths]
        self.notes = [note for file in self._files for note in file.notes]
        self.has_decimal_comma = any(file.has_decimal_comma for file in self._files)
        self.columns = list(self._files[0].names)
        for file in self._files:
            _require_distinct_columns(file, self.columns)

    def __str__(self) -> str:
        if len(self.paths) == 1:
            return str(self.paths[0])
        return f"{self.paths[0].parent} ({len(self.paths)} files)"

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows once, at most ``BATCH_ROWS`` at a time, with the given columns in the given order.

        Columns of text files are strings, those of Parquet files have the file's types. Memory stays bounded.
        """
        for file in self._files:
            yield from _read_batches(file, columns or self.columns)


def _read_batches(file: TextFile | _ParquetFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    _require_distinct_columns(file, columns)
    batches = file.batches(columns)
    while True:
        with wrap_read_errors(file.path, file.kind):
            try:
                batch = next(batches, None)
            except pa.ArrowInvalid as error:
                if message := file.rephrase(error):
                    raise DataError(message) from error
                raise
        if batch is None:
            return
        if batch.num_rows:
            yield batch.select(columns)


def _require_distinct_columns(file: TextFile | _ParquetFile, columns: Sequence[str]) -> None:
    """Raise DataError if one of ``columns`` is not in the file, or more than once."""
    require_columns(file.path, columns, file.names)
    for name in columns:
        if file.names.count(name) > 1:
            raise DataError(f"{file.path} has more than one column {name}; rename the others.")


def read_column_names(path: Path) -> list[str]:
    """The names of all columns; of a CSV or TSV file only the beginning is read."""
    return _open(path, "utf-8").names


def read_table(path: Path, columns: Iterable[str]) -> pd.DataFrame:
    """Read the given columns of one file, and only these, in the order of the rows.

    Columns of a CSV or TSV file, which is UTF-8, are texts: the id 007 is not 7. Spaces before a text do not
    belong to it, and an empty text is a missing value. Columns of a Parquet file have the file's types.
    """
    wanted = list(columns)
    file = _open(path, "utf-8")
    if isinstance(file, _ParquetFile):
        with wrap_read_errors(path, file.kind):
            require_fitting(path, parquet.read_metadata(path).num_rows * ROW_BYTES)
    batches = list(_read_batches(file, wanted))
    require_rows(path, sum(batch.num_rows for batch in batches))
    table = pa.Table.from_batches(batches).unify_dictionaries()
    if isinstance(file, TextFile):
        trimmed = [pc.utf8_ltrim(column, " \t") for column in table.columns]
        table = pa.table([pc.if_else(pc.equal(column, ""), None, column) for column in trimmed], wanted)
    return table.to_pandas(ignore_metadata=True)  # an index that pandas stored is a column like any other
