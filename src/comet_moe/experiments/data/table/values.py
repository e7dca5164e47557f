"""Columns of a table as numpy arrays: numbers, categories, dates and lists of categories.

Each function takes an Arrow array of any type. A value has the same meaning in a text file and in a typed
one. For example, 7, 7.0 and "7" are one category, and so are true and "True".
"""

import re
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]
Dates = npt.NDArray[np.datetime64]

_WHOLE = re.compile(r"(-?\d+)\.0+")
_SPACES = "'’ \u00a0\u202f"
_WRITTEN = {
    decimal: re.compile(
        rf"([-+]?) ?[$€£¥]? ?([1-9]\d{{0,2}}(?:[{group}{_SPACES}]\d{{3}})+|\d+)(?:[{decimal}](\d+))?"
        r" ?[%$€£¥]?"
    )
    for decimal, group in ((".", ","), (",", "."))
}
"""Numbers as people write them, by their decimal mark: sign, currency, groups of digits, fraction, unit."""
DATE_PARTS = ("days", "month", "weekday", "hour")
"""The parts of a date: days since 1970 as a number, the others as categories."""


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are strings, dictionaries of strings included."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether values of this type are lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_date(kind: pa.DataType) -> bool:
    """Whether values of this type are dates or points in time."""
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def is_number(kind: pa.DataType) -> bool:
    """Whether values of this type are numbers; booleans are not."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def is_readable(kind: pa.DataType) -> bool:
    """Whether a column of this type can be a feature or a target at all."""
    if is_list(kind):
        return not is_list(kind.value_type) and is_readable(kind.value_type)
    if pa.types.is_dictionary(kind):
        return is_readable(kind.value_type)
    known = is_text(kind) or is_date(kind) or is_number(kind)
    return known or bool(pa.types.is_boolean(kind) or pa.types.is_null(kind))


def text_of(value: Any) -> str | None:
    """A value as the text of a category; None where it is missing."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if value != value:
            return None
        return str(int(value)) if value.is_integer() else str(value)
    text = str(value).strip()
    if text in ("True", "TRUE", "False", "FALSE"):
        return text.lower()
    whole = _WHOLE.fullmatch(text)
    return (whole[1] if whole else text) or None


def as_categories(values: pa.Array) -> tuple[Codes, list[str]]:
    """Categories as indices into a list of texts, -1 where a value is missing: (B,), distinct texts."""
    if pa.types.is_float16(values.type):  # older versions of pyarrow do not encode it
        values = values.cast(pa.float32())
    if not pa.types.is_dictionary(values.type):
        values = values.dictionary_encode()
    codes = pc.fill_null(values.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    try:
        found = values.dictionary.to_pylist()
    except (OverflowError, ValueError):  # a date beyond the year 9999, which Python does not know
        found = values.dictionary.cast(pa.string()).to_pylist()
    texts = [text_of(value) for value in found]
    distinct: dict[str, int] = {}
    numbers = [-1 if text is None else distinct.setdefault(text, len(distinct)) for text in texts]
    return np.array([*numbers, -1], dtype=np.int64)[codes], list(distinct)


def count_texts(codes: Codes, texts: list[str]) -> Counter[str]:
    """The rows of each text; those of the code -1 do not count."""
    counts = np.bincount(codes[codes >= 0], minlength=len(texts)).tolist()
    return Counter({text: count for text, count in zip(texts, counts, strict=True) if count})


def as_numbers(values: pa.Array, decimal: str = ".") -> Floats:
    """Numbers (B,), NaN where a value is missing or is a text that is not a number with this mark."""
    kind = values.type
    if pa.types.is_boolean(kind) or is_number(kind):
        numbers: Floats = pc.cast(values, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return numbers.astype(np.float64)
    if is_date(kind):
        return as_days(as_dates(values))
    plain = cast_numbers(values) if decimal == "." else None
    if plain is not None:
        return plain
    codes, texts = as_categories(values)
    return np.append(numbers_of(texts, decimal), np.nan)[codes]


def cast_numbers(values: pa.Array) -> Floats | None:
    """The numbers (B,) of texts as programs write them, NaN for missing ones; None if one is not a number."""
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return None
    try:
        numbers: Floats = pc.cast(values, pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        return None
    return numbers if int(np.isnan(numbers).sum()) == values.null_count else None


def numbers_of(texts: list[str], decimal: str = ".") -> Floats:
    """The number of each text, NaN where it is not one.

    Groups of three digits, a currency and % are read over: 1,234.50, $5 and 40% are 1234.5, 5 and 40.

    Args:
        texts: distinct texts without spaces around them.
        decimal: the mark before the fraction, "." or ",".
    """
    return written_numbers(texts, plain_numbers(texts), decimal)


def plain_numbers(texts: list[str]) -> Floats:
    """The number of each text as a program writes it, NaN where it is not one."""
    numbers = pd.to_numeric(pd.Series(texts, dtype="str"), errors="coerce")
    return numbers.to_numpy(np.float64, na_value=np.nan)


def written_numbers(texts: list[str], plain: Floats, decimal: str) -> Floats:
    """As `numbers_of`, where :func:`plain_numbers` are known."""
    numbers = plain.copy()
    for index in np.flatnonzero(np.isnan(plain) | (decimal == ",")):
        text = texts[index]
        if decimal == "," and "." in text:
            numbers[index] = np.nan
        found = _WRITTEN[decimal].fullmatch(text)
        if found:
            digits = re.sub(r"\D", "", found[2])
            numbers[index] = float(f"{found[1]}{digits}.{found[3] or 0}")
    return numbers


def as_dates(values: pa.Array) -> Dates:
    """Points in time (B,) to the second, in UTC if there is a time zone; NaT where a value is missing."""
    if is_date(values.type):
        seconds = pc.cast(pc.cast(values, pa.timestamp("us"), safe=False), pa.timestamp("s"), safe=False)
        return seconds.to_numpy(zero_copy_only=False).astype("datetime64[s]")
    codes, texts = as_categories(values)
    return np.append(dates_of(texts), np.datetime64("NaT", "s"))[codes]


def dates_of(texts: list[str]) -> Dates:
    """The date or time of each text in the order year, month, day (ISO 8601), NaT where it is not one."""
    dates = pd.to_datetime(pd.Series(texts, dtype="str"), format="ISO8601", errors="coerce", utc=True)
    return dates.dt.tz_localize(None).to_numpy("datetime64[s]")


def as_days(dates: Dates) -> Floats:
    """Days since 1970 with their fraction, NaN for NaT."""
    days = dates.astype("datetime64[s]").astype(np.int64) / 86400
    return np.where(np.isnat(dates), np.nan, days)


def date_part(dates: Dates, part: str) -> tuple[Codes, list[str]]:
    """The month, weekday (0 is Monday) or hour of dates, as :func:`as_categories` gives categories."""
    index = pd.DatetimeIndex(dates)
    values = np.asarray(getattr(index, "day_of_week" if part == "weekday" else part), dtype=np.float64)
    codes = np.where(np.isnan(values), -1, np.nan_to_num(values)).astype(np.int64)
    return codes, [str(value) for value in range(24)]


def as_lists(values: pa.Array, separator: str) -> tuple[Codes, Codes, list[str]]:
    """Lists of categories: lengths (B,), indices of all elements in order (M,), distinct texts.

    A text is split at ``separator``. A missing value is a list of length 0, missing elements have index -1.
    """
    if not is_list(values.type):
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        values = pc.split_pattern(pc.cast(values, pa.string()), separator)
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    codes, texts = as_categories(pc.list_flatten(values))
    return lengths.astype(np.int64), codes, texts
