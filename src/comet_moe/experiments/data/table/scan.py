"""The first pass over a table: what each column holds, in bounded memory."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.table.source import TableSource
from comet_moe.experiments.data.table.values import (
    Codes,
    Floats,
    as_categories,
    as_lists,
    as_numbers,
    cast_numbers,
    dates_of,
    is_date,
    is_list,
    is_number,
    is_readable,
    is_text,
    numbers_of,
    plain_numbers,
    written_numbers,
)

MAX_DISTINCT = 1000
"""Most distinct values of a column that are counted."""
HEAD_ROWS = 20_000
"""The share of distinct values is computed on this many rows at the beginning of a table."""
ID_SHARE = 0.95
"""A column of text or ids with at least this share of distinct values identifies the rows."""

TEXT_WORDS = 3
"""A column of texts with at least as many words on average is read word by word, unless many are equal."""
TEXT_SHARE = 0.5
"""Least share of distinct values in such a column."""

_DATE_TEXT = re.compile(r"\d{1,4}[./-]\d{1,2}[./-]\d{1,4}([ T].*)?")


@dataclass
class NumberScan:
    """What the values of a column are as numbers, if ``decimal`` is the mark before a fraction.

    Attributes:
        numbers, texts: values that are numbers, and that are not.
        infinite: values that are infinite numbers.
        first_text: the first value that is not a number, and its data row from 1.
        low, high: smallest and largest finite number.
        is_integer: whether all numbers are integers.
        written: the first value with a separator or a unit, such as $1,234, and its number.
    """

    decimal: str
    numbers: int = 0
    texts: int = 0
    infinite: int = 0
    first_text: tuple[str, int] | None = None
    low: float = np.inf
    high: float = -np.inf
    is_integer: bool = True
    written: tuple[str, float] | None = None

    def add_numbers(self, present: Floats) -> None:
        """Count values that are all numbers."""
        finite = present[np.isfinite(present)]
        self.numbers += len(present)
        self.infinite += len(present) - len(finite)
        self._add_range(finite)

    def add_texts(self, codes: Codes, texts: list[str], plain: Floats, first_row: int) -> None:
        """Count values ``codes`` (B,), indices into ``texts``, whose numbers are ``plain`` where they are."""
        numbers = written_numbers(texts, plain, self.decimal)
        counts = np.bincount(codes[codes >= 0], minlength=len(texts))
        is_one = ~np.isnan(numbers)
        self.numbers += int(counts[is_one].sum())
        self.texts += int(counts[~is_one].sum())
        self.infinite += int(counts[np.isinf(numbers)].sum())
        if self.first_text is None and not is_one.all():
            row = int(np.flatnonzero(np.isin(codes, np.flatnonzero(~is_one)))[0])
            self.first_text = texts[codes[row]], first_row + row
        if self.written is None and is_one.any():
            written = np.flatnonzero(is_one & (numbers != plain))
            if len(written):
                self.written = texts[written[0]], float(numbers[written[0]])
        self._add_range(numbers[np.isfinite(numbers)])

    def _add_range(self, finite: Floats) -> None:
        if len(finite):
            self.low, self.high = min(self.low, finite.min()), max(self.high, finite.max())
            self.is_integer &= bool((finite == np.floor(finite)).all())


class ColumnScan:
    """What one column of a table holds.

    Args:
        name: of the column.
        expects_comma: whether other numbers of the table have decimal commas.

    Attributes:
        rows, missing: rows in total, and without a value.
        counts: the distinct values as texts, at most ``MAX_DISTINCT`` + 1 of them, with rows of each so far.
        is_padded: whether a number is written with a leading zero, as in "007".
        is_date: whether all values are dates.
        looks_like_date: whether all values look like a date, in whatever order of day and month.
        is_list: whether the values are lists.
        is_readable: whether the type of the column can be used at all.
    """

    def __init__(self, name: str, expects_comma: bool = False):
        self.name = name
        self.rows = self.missing = 0
        self.counts: Counter[str] = Counter()
        self.is_date = self.looks_like_date = self.is_readable = True
        self.is_padded = self.is_list = False
        self._expects_comma = expects_comma
        self._point = NumberScan(".")
        self._comma: NumberScan | None = None  # from the first comma on, unless a point came before
        self._head_rows = 0
        self._head: set[Any] = set()  # distinct values in these rows
        self._head_words = 0  # in these distinct values

    @property
    def number(self) -> NumberScan:
        """The values as numbers, with the decimal mark that leaves fewer texts."""
        point, comma = self._point, self._comma
        if comma is None or comma.texts > point.texts or comma.written is None:
            return point
        return comma if comma.texts < point.texts or self._expects_comma else point

    @property
    def is_row_number(self) -> bool:
        """Whether the values are the numbers of the rows, in any order."""
        number = self.number
        return (
            self.rows == number.numbers == number.high - number.low + 1
            and number.is_integer
            and 20 <= self._head_rows == len(self._head)
        )

    @property
    def has_many(self) -> bool:
        """Whether there are more than ``MAX_DISTINCT`` distinct values."""
        return len(self.counts) > MAX_DISTINCT

    @property
    def values(self) -> int:
        """Rows with a value."""
        return self.rows - self.missing

    @property
    def identifies_rows(self) -> bool:
        """Whether nearly every row has a value of its own."""
        return self._head_rows >= 20 and len(self._head) >= ID_SHARE * self._head_rows

    @property
    def is_prose(self) -> bool:
        """Whether the values are texts of several words, most of which differ."""
        distinct = len(self._head)
        return (
            self._head_rows >= 20
            and distinct >= TEXT_SHARE * self._head_rows
            and self._head_words >= TEXT_WORDS * distinct
            and not self.looks_like_date
        )

    def add(self, values: pa.Array) -> None:
        """Count the values of one batch."""
        kind = values.type
        self.is_readable &= is_readable(kind)
        if not self.is_readable or pa.types.is_null(kind):
            self.missing += len(values)
        elif is_list(kind):
            self._add_lists(values)
        elif is_number(kind):
            self._add_numbers(values)
        else:
            self._add_categories(values)
        self.rows += len(values)

    def _add_lists(self, values: pa.Array) -> None:
        lengths, codes, texts = as_lists(values, "")
        self.is_list = True
        self.missing += int((lengths == 0).sum())
        self.is_date = self.looks_like_date = False
        self._count(codes, texts)

    def _add_numbers(self, values: pa.Array) -> None:
        numbers = as_numbers(values)
        present = numbers[~np.isnan(numbers)]
        self.missing += len(numbers) - len(present)
        self._point.add_numbers(present)
        self.is_date = self.looks_like_date = False
        if self.rows < HEAD_ROWS:
            self._add_head(np.unique(present).tolist(), len(present))
        if not self.has_many:
            self._count(*as_categories(values))

    def _add_plain_numbers(self, values: pa.Array, numbers: Floats) -> None:
        """Count texts that are all ``numbers``, which is much faster than to count any texts."""
        present = numbers[~np.isnan(numbers)]
        self.missing += len(numbers) - len(present)
        self._point.add_numbers(present)
        self.is_padded |= bool(pc.any(pc.match_substring_regex(values, r"^\s*0\d+\s*$")).as_py())
        if len(present):
            self.is_date = self.looks_like_date = False
        if self.rows < HEAD_ROWS:
            self._add_head(np.unique(present).tolist(), len(present))
        if not self.has_many:
            self._count(*as_categories(values))

    def _add_categories(self, values: pa.Array) -> None:
        numbers = None if self._comma or self._expects_comma else cast_numbers(values)
        if numbers is not None:
            self._add_plain_numbers(values, numbers)
            return
        codes, texts = as_categories(values)
        self.missing += int((codes < 0).sum())
        plain = plain_numbers(texts) if is_text(values.type) else np.full(len(texts), np.nan)
        has_comma = self._expects_comma or any("," in text for text in texts)
        if self._comma is None and has_comma and self._point.is_integer:
            self._comma = replace(self._point, decimal=",")
        for number in filter(None, (self._point, self._comma)):
            number.add_texts(codes, texts, plain, self.rows + 1)
        self.is_padded |= any(len(text) > 1 and text[0] == "0" and text.isdigit() for text in texts)
        if is_date(values.type):
            self.looks_like_date = False
        elif self.is_date or self.looks_like_date:
            self.looks_like_date &= all(_DATE_TEXT.fullmatch(text) for text in texts)
            self.is_date &= self.looks_like_date and not np.isnat(dates_of(texts)).any()
        if self.rows < HEAD_ROWS:
            self._head_words += sum(len(text.split()) for text in texts if text not in self._head)
            self._add_head(texts, int((codes >= 0).sum()))
        self._count(codes, texts)

    def _add_head(self, distinct: list[Any], count: int) -> None:
        self._head_rows += count
        self._head.update(distinct)

    def _count(self, codes: Any, texts: list[str]) -> None:
        for text, count in zip(texts, np.bincount(codes[codes >= 0], minlength=len(texts)), strict=True):
            if self.has_many:
                break
            self.counts[text] += int(count)


def sort_classes(texts: Iterable[str]) -> list[str]:
    """Texts in order: as numbers where all are."""
    distinct = sorted(texts)
    numbers = numbers_of(distinct)
    return distinct if np.isnan(numbers).any() else [distinct[i] for i in np.argsort(numbers, kind="stable")]


def scan_table(source: TableSource) -> dict[str, ColumnScan]:
    """One pass over all rows: what each column holds."""
    scans = {name: ColumnScan(name, source.has_decimal_comma) for name in source.columns}
    for batch in source.batches():
        for name, scan in scans.items():
            scan.add(batch.column(name))
    if not next(iter(scans.values())).rows:
        raise DataError(f"{source} has no rows; at least one is needed.")
    return scans
