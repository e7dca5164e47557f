"""A CSV or TSV file: how it begins, and its rows in batches by Arrow.

The first line names the columns. What is guessed is in ``notes``. UTF-16 is recognised by its byte order
mark, the separator by the first line. Commas are decimal points if the first rows of a file with semicolons
have such numbers.
"""

import codecs
import csv as python_csv
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.raw_files import require_rows, wrap_read_errors

BLOCK = 2**20
"""Arrow's size of a block, in bytes: the header, and every row, must be shorter."""
BATCH_ROWS = 2**16
"""Most rows of a batch."""
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
"""Characters that may be between the values of a text file, the usual one first."""

COMPRESSED = (".gz", ".zst", ".bz2")
"""Endings of compressed text files, after that of the table, as in my.csv.gz."""

_BLOCKS = 8  # that make a batch
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")
_DECIMAL_ROWS = 1000


def table_suffix(path: Path) -> str:
    """The ending that tells the format: that of my.csv.gz is .csv."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    is_compressed = suffixes[-1:] and suffixes[-1] in COMPRESSED and suffixes[0] in (".csv", ".tsv")
    return suffixes[0] if is_compressed else path.suffix.lower()


class TextFile:
    """One text file of a table; the arguments are those of ``TableSource``.

    Attributes:
        names: names of all columns.
        notes: what was guessed, one sentence each.
        has_decimal_comma: whether numbers are written with a comma, such as 1,5.
    """

    def __init__(self, path: Path, encoding: str | None, separator: str | None, missing: Sequence[str]):
        self.path = path
        self.notes: list[str] = []
        self._missing = list(missing)
        with wrap_read_errors(path, "file"), path.open("rb"):
            pass  # unlike Arrow's, this error has the reason why a file cannot be opened
        self.encoding = self._guess_encoding() if encoding is None else encoding
        self._fix = "save it as UTF-8"
        if encoding != "utf-8":
            self._fix += ", or name its encoding, such as cp1252, by the option encoding"
        self.kind = f"{self.encoding.upper()} table"
        self._read_head(separator)

    def _guess_encoding(self) -> str:
        with wrap_read_errors(self.path, "file"), pa.input_stream(self.path) as file:
            mark = file.read(3)
        if mark.startswith(_UTF16_MARKS):
            self.notes.append(f"{self.path.name} is read as UTF-16, by its byte order mark")
            return "utf-16"
        if mark == codecs.BOM_UTF8:
            self.notes.append(f"{self.path.name} begins with a byte order mark, which is skipped")
        return "utf-8"

    def _read_head(self, separator: str | None) -> None:
        """Find separator, names of columns, and how rows end, from the first block."""
        path, usual = self.path, "\t" if table_suffix(self.path) == ".tsv" else ","
        try:
            codecs.lookup(self.encoding)
        except LookupError as error:
            raise DataError(f"option encoding is {self.encoding!r}; give a name such as cp1252.") from error
        # Bytes that are not UTF-8 are only an error in the columns that are read, where Arrow finds them.
        encoding = "utf-8-sig" if self.encoding == "utf-8" else self.encoding
        with wrap_read_errors(path, self.kind), pa.input_stream(path) as stream:
            head = io.TextIOWrapper(stream, encoding=encoding, errors="replace").read(BLOCK)
        first_line = head.partition("\n")[0]
        if not first_line.strip():
            state = "has an empty first line" if head.strip() else "is empty"
            raise DataError(f"{path} {state}; give a table whose first line names its columns.")
        if "\0" in first_line or "\ufffd" in first_line:
            raise DataError(f"{path} is not {self.encoding.upper()} text; {self._fix}.")
        guessed = usual if usual == "\t" else max(SEPARATORS, key=first_line.count)
        self.separator = separator or guessed
        if separator is None and guessed != usual:
            name = SEPARATORS[guessed]
            self.notes.append(f"{path.name} is read with {name} between its values, as in its first line")
        reader = python_csv.reader(io.StringIO(head), delimiter=self.separator)
        with wrap_read_errors(path, self.kind):
            self.names = [name.strip() for name in next(reader)]
        self._lines = reader.line_num
        if not "".join(head.split("\n")[self._lines :]).strip():
            require_rows(path, 0)
        rows: list[list[str]] = []
        with suppress(python_csv.Error):  # a value longer than Python's csv module accepts
            for row in islice(filter(None, reader), _DECIMAL_ROWS):
                rows.append(row)
        # Rows, but not the header, may end in a separator: a column of its own, which has no value.
        has_end = rows and len(rows[0]) == len(self.names) + 1 and not rows[0][-1].strip()
        self._end = f"\0{len(self.names)}" if has_end else ""
        complete = rows[:-1] if len(head) == BLOCK else rows
        self.has_decimal_comma = self.separator == ";" and any(
            _DECIMAL_COMMA.fullmatch(value.strip()) for row in complete for value in row
        )
        if self.has_decimal_comma:
            self.notes.append(f"{path.name} is read with commas as decimal points, as in its first rows")

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows in order, with columns of strings."""
        types = dict.fromkeys([*columns, *([self._end] if self._end else [])], pa.string())
        # Arrow rejects repeated names, even of columns that are not read: those are named by their number.
        names = [name if name in types else f"\0{index}" for index, name in enumerate(self.names)]
        reader = csv.open_csv(
            self.path,
            csv.ReadOptions(
                column_names=[*names, *([self._end] if self._end else [])],
                skip_rows=self._lines,
                block_size=BLOCK,
                encoding=self.encoding,
                use_threads=False,
            ),
            csv.ParseOptions(delimiter=self.separator, newlines_in_values=True),
            csv.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                null_values=self._missing,
                strings_can_be_null=True,
            ),
        )
        first_row = 1
        # Arrow reads up to 32 blocks ahead: they are small, and put together, since each batch has its cost.
        waiting: list[pa.RecordBatch] = []
        for batch in reader:
            if self._end and batch.column(self._end).null_count < batch.num_rows:
                row = first_row + pc.index(pc.is_valid(batch.column(self._end)), True).as_py()
                raise DataError(
                    f"{self.path} has {len(self.names) + 1} values instead of {len(self.names)} in data row "
                    f"{row}; name all columns in the first line."
                )
            first_row += batch.num_rows
            waiting.append(batch)
            rows = sum(own.num_rows for own in waiting)
            if rows + batch.num_rows > BATCH_ROWS or len(waiting) == _BLOCKS:
                yield pa.concat_batches(waiting)
                waiting = []
        if waiting:
            yield pa.concat_batches(waiting)

    def rephrase(self, error: pa.ArrowInvalid) -> str | None:
        """Arrow's message about one row in terms of the table; None if it is about something else."""
        reason = str(error)
        ragged = re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", reason)
        if ragged:
            row, expected, actual = (int(number) for number in ragged.groups())
            return (
                f"{self.path} has {actual} values instead of {expected} in data row {row - self._lines}; "
                f"complete the row, or put quotes, with no space before them, around a value with a "
                f"{self.separator!r}."
            )
        value = re.search(r"column #(\d+): Row #(\d+): CSV conversion error to string", reason)
        if value:
            return (
                f"{self.path} has a value in column {self.names[int(value[1])]}, data row "
                f"{int(value[2]) - self._lines}, that is not {self.encoding.upper()}; {self._fix}."
            )
        if "straddling object" in reason:
            return (
                f"{self.path} has a row of more than {BLOCK:,} bytes; look for a quote that is never closed."
            )
        return None
