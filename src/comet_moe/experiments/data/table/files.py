"""Reading columns of a table file (.csv, .tsv or .parquet) by ``pyarrow.dataset``.

CSV and TSV files are UTF-8 text whose first line names the columns; a CSV file may be separated by commas,
semicolons, tabs or vertical bars. Spaces before a value do not belong to it, and an empty value is a missing
one.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.dataset as ds
from pyarrow import parquet
from pyarrow.fs import LocalFileSystem

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.raw_files import (
    require_columns,
    require_fitting,
    require_rows,
    wrap_read_errors,
)

BLOCK = 2**20
"""Arrow's size of a block, in bytes: the header, and every row, must be shorter."""
ROW_BYTES = 400
"""Memory that a row of ratings needs until it is prepared, about: ids, hash tables, unrated pairs, splits."""
_PARQUET = "Parquet file"
_TEXT = "UTF-8 table"


SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
"""Characters that may be between the values of a text file, the usual one first."""
SAVE_AS_UTF8 = "save it as UTF-8"


def suffix_of(path: Path) -> str:
    """The ending of a file's name that tells its format, in lower case."""
    return path.suffix.lower()


def read_column_names(path: Path) -> list[str]:
    """Return the names of all columns; of a CSV or TSV file only the beginning is read."""
    return inspect_parquet(path).names if suffix_of(path) == ".parquet" else list(read_header(path).names)


def read_table(path: Path, columns: Iterable[str], numbers: Collection[str] = ()) -> pd.DataFrame:
    """Read the given columns, and only these, in the order of the rows.

    Args:
        path: a file that ends in .csv, .tsv or .parquet.
        columns: the names of the columns to read. DataError if one is missing.
        numbers: the columns of a CSV or TSV file to read as float64, NaN where a value is missing. Its other
            columns are text, so that the id 007 is not 7. Columns of a Parquet file have the file's types.
    """
    wanted = list(columns)
    table = (
        _read_parquet(path, wanted)
        if suffix_of(path) == ".parquet"
        else _read_text(path, wanted, set(numbers))
    )
    require_rows(path, table.num_rows)
    return table.to_pandas(ignore_metadata=True)  # an index that pandas stored is a column like any other


def inspect_parquet(path: Path) -> pa.Schema:
    """The names and types of the columns of a Parquet file."""
    with wrap_read_errors(path, _PARQUET):
        with path.open("rb"):  # unlike Arrow's, this error has the reason why a file cannot be opened
            pass
        return ds.ParquetFileFormat().inspect(str(path), filesystem=LocalFileSystem())


def _read_parquet(path: Path, columns: list[str]) -> pa.Table:
    schema = inspect_parquet(path)
    require_distinct_columns(path, columns, schema.names)
    with wrap_read_errors(path, _PARQUET):
        rows = parquet.ParquetFile(path).metadata.num_rows
        require_fitting(path, rows * ROW_BYTES)
        dataset = ds.dataset(str(path), schema=schema, format="parquet", filesystem=LocalFileSystem())
        return dataset.to_table(columns=columns)


@dataclass(frozen=True)
class Header:
    """How a CSV or TSV file begins.

    Attributes:
        encoding: of the text, by Python's name.
        separator: character between the values of a row.
        names: names of the columns.
        lines: how many lines the names take.
        has_trailing_separator: whether rows, but not the header, end in a separator.
    """

    encoding: str
    separator: str
    names: tuple[str, ...]
    lines: int
    has_trailing_separator: bool

    @property
    def trailing_name(self) -> str:
        """The name of the column after the last separator, which no column of a file has."""
        return f"\0{len(self.names)}"


def _read_text(path: Path, columns: list[str], numbers: set[str]) -> pa.Table:
    header = read_header(path)
    require_distinct_columns(path, columns, header.names)
    # Large strings are what pandas stores: they are not copied again.
    schema = pa.schema([(name, pa.float64() if name in numbers else pa.large_string()) for name in columns])
    if header.has_trailing_separator:
        schema = schema.append(pa.field(header.trailing_name, pa.large_string()))
    reading, parsing, converting = make_text_options(header, schema, null_values=[""])
    text_format = ds.CsvFileFormat(read_options=reading, parse_options=parsing, convert_options=converting)
    with wrap_read_errors(path, _TEXT):
        try:
            dataset = ds.dataset(str(path), schema=schema, format=text_format, filesystem=LocalFileSystem())
            table = dataset.to_table()
            require_empty_end(path, header, table, first_row=1)
        except pa.ArrowInvalid as error:
            message = rephrase_error(path, header, str(error))
            if message is None:
                raise
            raise DataError(message) from error
    for index, name in enumerate(columns):
        if name not in numbers:
            table = table.set_column(index, name, _trim(path, name, table[name]))
    return table.select(columns)


def read_header(
    path: Path, encoding: str = "utf-8", separator: str | None = None, fix: str = SAVE_AS_UTF8
) -> Header:
    """Read how a CSV or TSV file begins.

    Args:
        path: the file.
        encoding: of the text, by Python's name.
        separator: character between values; None: a tab for .tsv, else that of ``SEPARATORS`` which is most
            frequent in the first line.
        fix: what to do about text of another encoding.
    """
    if suffix_of(path) not in (".csv", ".tsv"):
        raise DataError(f"{path} ends in {path.suffix!r}; give a .csv, .tsv or .parquet table.")
    # Bytes that are not UTF-8 are only an error in the columns that are read, where Arrow finds them.
    python_encoding = "utf-8-sig" if encoding == "utf-8" else encoding
    with wrap_read_errors(path, _TEXT), path.open(encoding=python_encoding, errors="replace") as file:
        head = file.read(BLOCK)
    first_line = head.partition("\n")[0]
    if not first_line.strip():
        state = "has an empty first line" if head.strip() else "is empty"
        raise DataError(f"{path} {state}; give a table whose first line names its columns.")
    if "\0" in first_line or "\ufffd" in first_line:
        raise DataError(f"{path} is not {encoding.upper()} text; {fix}.")
    if separator is None:
        separator = "\t" if suffix_of(path) == ".tsv" else max(SEPARATORS, key=first_line.count)
    rows = csv.reader(io.StringIO(head), delimiter=separator)
    with wrap_read_errors(path, _TEXT):
        names = tuple(name.strip() for name in next(rows))
    lines = rows.line_num
    if not "".join(head.split("\n")[lines:]).strip():
        require_rows(path, 0)
    row: list[str] = []
    with suppress(csv.Error):  # a value longer than Python's csv module accepts
        row = next(filter(None, rows), row)
    has_trailing_separator = len(row) == len(names) + 1 and not row[-1].strip()
    return Header(encoding, separator, names, lines, has_trailing_separator)


def make_text_options(
    header: Header, schema: pa.Schema, null_values: list[str]
) -> tuple[pyarrow.csv.ReadOptions, pyarrow.csv.ParseOptions, pyarrow.csv.ConvertOptions]:
    """Arrow's options to read the columns of ``schema`` from a file with the given header."""
    # Arrow rejects repeated names, even of columns that are not read: those are named by their number.
    names = [name if name in schema.names else f"\0{index}" for index, name in enumerate(header.names)]
    if header.has_trailing_separator:
        names.append(header.trailing_name)
    return (
        pyarrow.csv.ReadOptions(
            column_names=names,
            skip_rows=header.lines,
            block_size=BLOCK,
            encoding=header.encoding,
        ),
        pyarrow.csv.ParseOptions(delimiter=header.separator, newlines_in_values=True),
        pyarrow.csv.ConvertOptions(
            column_types=schema,
            null_values=null_values,
            strings_can_be_null=True,
        ),
    )


def require_empty_end(path: Path, header: Header, rows: pa.Table | pa.RecordBatch, first_row: int) -> None:
    """Raise DataError if a row has a value after the separator that ends rows; the first is ``first_row``."""
    if not header.has_trailing_separator:
        return
    end = rows.column(header.trailing_name)
    if end.null_count < len(end):
        index = pc.index(pc.is_valid(end), True).as_py()
        raise DataError(
            f"{path} has {len(header.names) + 1} values instead of {len(header.names)} in data row "
            f"{first_row + index}; name all columns in the first line."
        )


def rephrase_error(path: Path, header: Header, reason: str, fix: str = SAVE_AS_UTF8) -> str | None:
    """Rephrase Arrow's message about one row in terms of the table; None if it is about something else."""
    ragged = re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", reason)
    if ragged:
        row, expected, actual = (int(number) for number in ragged.groups())
        return (
            f"{path} has {actual} values instead of {expected} in data row {row - header.lines}; complete "
            f"the row, or put quotes, with no space before them, around a value with a {header.separator!r}."
        )
    value = re.search(r"column #(\d+): Row #(\d+): CSV conversion error to (\w+)(.*)", reason, re.DOTALL)
    if value:
        where = f"in column {header.names[int(value[1])]}, data row {int(value[2]) - header.lines}"
        if value[3].endswith("string"):
            return f"{path} has a value {where}, that is not {header.encoding.upper()}; {fix}."
        text = " ".join(value[4].removeprefix(": invalid value ").split())[:100]
        return f"{path} has {text} {where}; it must be a number."
    if "straddling object" in reason:
        return f"{path} has a row of more than {BLOCK:,} bytes; look for a quote that is never closed."
    return None


def _trim(path: Path, name: str, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Drop the spaces before each text; a text of spaces alone is missing."""
    is_padded = pc.or_(pc.starts_with(values, " "), pc.starts_with(values, "\t"))
    if not pc.any(is_padded).as_py():
        return values
    trimmed = pc.utf8_ltrim(values, " \t")
    row = pc.index(pc.and_(is_padded, pc.starts_with(trimmed, '"')), True).as_py()
    if row >= 0:
        raise DataError(
            f"{path} has a space before a quote in column {name}, data row {row + 1}; remove the space."
        )
    return pc.if_else(pc.equal(trimmed, ""), None, trimmed)


def require_distinct_columns(path: Path, columns: list[str], present: Collection[str]) -> None:
    """Raise DataError if one of ``columns`` is not in the table, or more than once."""
    require_columns(path, columns, present)
    repeated = next((name for name in columns if list(present).count(name) > 1), None)
    if repeated is not None:
        raise DataError(f"{path} has more than one column {repeated}; rename the others.")
