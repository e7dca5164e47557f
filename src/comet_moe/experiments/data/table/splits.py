"""Which split each row of a streamed table belongs to, decided batch by batch in bounded memory.

Exact sizes need no list of all rows. The number of rows of a block in each split follows a multivariate
hypergeometric distribution: a draw without replacement from all rows that are left. The rows are random.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.raw_files import require_columns
from comet_moe.experiments.data.splits import SPLITS, make_rng, share_sizes
from comet_moe.experiments.data.table.copies import Copies, Keys, row_keys
from comet_moe.experiments.data.table.fit import RandomRows
from comet_moe.experiments.data.table.scan import ColumnScan
from comet_moe.experiments.data.table.schema import TableOptions
from comet_moe.experiments.data.table.source import TableSource
from comet_moe.experiments.data.table.values import (
    as_categories,
    as_dates,
    as_days,
    as_numbers,
    count_texts,
    is_date,
)

SplitCodes = npt.NDArray[np.int8]  # 0 train, 1 validation, 2 test
Assign = Callable[[pa.RecordBatch], SplitCodes]
"""Gives the split of each row of the next batch; the batches are those of one pass, in order."""

_BLOCK = 2**15
_TIME_SAMPLE = 2**18


def plan_splits(
    sources: Mapping[str, TableSource],
    scans: Mapping[str, ColumnScan],
    options: TableOptions,
    split: str,
    seed: int,
    class_columns: Sequence[str],
    copies: Copies | None = None,
) -> Callable[[], dict[str, Assign]]:
    """A function that makes, for a new pass, what assigns the rows of each source to splits.

    ``sources`` has the table, "train", and tables of their own for "validation" or "test". The first of
    ``class_columns`` is that to stratify by, unless an option names a column. A random split has all
    ``copies`` of a row in one split.
    """
    main = sources["train"]
    shares = [
        share if name == "train" or name not in sources else 0.0
        for name, share in zip(SPLITS, options.shares, strict=True)
    ]
    rows = next(iter(scans.values())).rows
    for name, size, share in zip(SPLITS, share_sizes(rows, shares), shares, strict=True):
        if share > 0 and not size:
            raise DataError(
                f"{main} has {rows} rows, which leave none for the {name} split; give more rows or other "
                f"shares."
            )
    make: Callable[[], Assign]
    if split == "random":
        by_key = None if copies is None else copies_assigner(copies, shares, seed)
        make = partial(random_assigner, rows, shares, seed) if by_key is None else lambda: by_key
    elif split == "stratified":
        column = options.stratify or next(iter(class_columns), None)
        if column is None:
            raise DataError("a stratified split needs the option stratify, the name of a column of classes.")
        require_single_values(main, scans, "stratify", column)
        if scans[column].has_many or (not scans[column].number.texts and not scans[column].number.is_integer):
            raise DataError(
                f"{main} has numbers or too many values in column {column}, by which the rows are to be "
                f"stratified; give a column of classes with the option stratify, or split at random."
            )
        make = partial(stratified_assigner, column, count_groups(main, column), shares, seed)
    else:
        column = options.group if split == "group" else options.time
        if column is None:
            raise DataError(f"a split by {split} needs the option {split}, the name of a column.")
        require_single_values(main, scans, split, column)
        if split == "group":
            make = partial(group_assigner, column, count_groups(main, column), shares, seed, main)
        else:
            by_time = time_assigner(main, column, shares, seed, scans[column].number.decimal)
            make = lambda: by_time  # noqa: E731 - the same in every pass, as it holds no state

    def assign_all(code: int, batch: pa.RecordBatch) -> SplitCodes:
        return np.full(batch.num_rows, code, dtype=np.int8)

    whole = {name: partial(assign_all, code) for code, name in enumerate(SPLITS) if name in sources}
    return lambda: {**whole, "train": make()}


def require_single_values(
    source: TableSource, scans: Mapping[str, ColumnScan], option: str, column: str
) -> None:
    """Raise DataError unless ``column``, which ``option`` names, exists and has single values."""
    require_columns(source, [column], scans, f", which the option {option} names")
    if scans[column].is_list or not scans[column].is_readable:
        raise DataError(
            f"{source} has lists or bytes in column {column}, which the option {option} names; name a column "
            f"of single values."
        )


class _ExactDraw:
    """Split codes of a stream of rows of which ``sizes`` are to be in each split."""

    def __init__(self, sizes: Sequence[int], rng: np.random.Generator):
        self._left = np.array(sizes, dtype=np.int64)
        self._rng = rng
        self._ready: SplitCodes = np.empty(0, dtype=np.int8)

    def take(self, rows: int) -> SplitCodes:
        """The codes of the next ``rows`` rows."""
        while len(self._ready) < rows:
            block = min(_BLOCK, int(self._left.sum()))
            if not block:
                raise DataError("the table has more rows than when it was counted: prepare it again")
            counts = self._rng.multivariate_hypergeometric(self._left, block, method="marginals")
            self._left -= counts
            codes = np.repeat(np.arange(len(counts), dtype=np.int8), counts)
            self._ready = np.concatenate([self._ready, self._rng.permutation(codes)])
        taken, self._ready = self._ready[:rows], self._ready[rows:]
        return taken


def random_assigner(rows: int, shares: Sequence[float], seed: int) -> Assign:
    """Random splits of exact sizes."""
    draw = _ExactDraw(share_sizes(rows, shares), make_rng(seed, "split"))
    return lambda batch: draw.take(batch.num_rows)


def stratified_assigner(column: str, counts: Mapping[str, int], shares: Sequence[float], seed: int) -> Assign:
    """Random splits with the same share of each value of ``column``, exact to within one row per value.

    ``counts`` are those of :func:`count_groups`.
    """
    draws = {
        text: _ExactDraw(share_sizes(count, shares), make_rng(seed, f"split {text}"))
        for text, count in counts.items()
    }

    def assign(batch: pa.RecordBatch) -> SplitCodes:
        codes, texts = as_categories(batch.column(column))
        split = np.zeros(len(codes), dtype=np.int8)
        for code in np.unique(codes):
            rows = np.flatnonzero(codes == code)
            split[rows] = draws["" if code < 0 else texts[code]].take(len(rows))
        return split

    return assign


def count_groups(source: TableSource, column: str) -> dict[str, int]:
    """Rows of each value of ``column``; "" stands for missing ones."""
    counts: Counter[str] = Counter()
    for batch in source.batches([column]):
        codes, texts = as_categories(batch.column(column))
        counts += count_texts(codes, texts) + Counter({"": int((codes < 0).sum())})
    return counts


def group_assigner(
    column: str, counts: Mapping[str, int], shares: Sequence[float], seed: int, source: object
) -> Assign:
    """Splits in which no value of ``column`` is in two: groups in random order fill one after the other."""
    wanted = [share for share in shares if share > 0]
    if len(counts) < len(wanted):
        raise DataError(
            f"{source} has {len(counts)} distinct values in the group column {column}; a split by group "
            f"needs at least {len(wanted)}: choose another column or another split."
        )
    names = sorted(counts)
    order = make_rng(seed, "split").permutation(len(names))
    sizes = np.array([counts[names[index]] for index in order])
    middle = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
    limits = np.cumsum(np.asarray(shares) / sum(shares))[:-1]
    split = np.searchsorted(limits, middle, side="right")
    _fill_empty(split, [index for index, share in enumerate(shares) if share > 0])
    by_text = {names[index]: code for index, code in zip(order, split, strict=True)}

    def assign(batch: pa.RecordBatch) -> SplitCodes:
        codes, texts = as_categories(batch.column(column))
        numbers = np.array([*(by_text[text] for text in texts), by_text.get("", 0)], dtype=np.int8)
        return numbers[codes]

    return assign


def _fill_empty(split: npt.NDArray[np.int64], wanted: list[int]) -> None:
    """Give every wanted split at least one group: large groups may leave one without."""
    for code in wanted:
        if not (split == code).any():
            largest = np.bincount(split, minlength=3).argmax()
            split[np.flatnonzero(split == largest)[-1]] = code


def copies_assigner(copies: Copies, shares: Sequence[float], seed: int) -> Assign | None:
    """Random splits with all copies of a row in one; None where a split would have no row.

    Rows are in the order of their keys, mixed with the seed.
    """
    salt = make_rng(seed, "split").integers(2**63, dtype=np.uint64)

    def order(keys: Keys) -> npt.NDArray[np.uint64]:
        return pd.util.hash_array(keys ^ salt)

    limits, missing = _limits(np.sort(order(copies.keys)), shares)
    if missing:
        return None

    def assign(batch: pa.RecordBatch) -> SplitCodes:
        found = order(row_keys(batch.select(copies.columns)))
        return np.searchsorted(limits, found, side="right").astype(np.int8)

    return assign


def _limits(ordered: npt.NDArray[Any], shares: Sequence[float]) -> tuple[npt.NDArray[Any], list[str]]:
    """The values at which the second and the third split begin, and the splits that have no value.

    ``ordered`` (N,) are all values or a sample of them. Equal values stay together.
    """
    sizes = np.cumsum(share_sizes(len(ordered), shares))[:-1]
    limits = ordered[sizes[sizes < len(ordered)]]
    probe = np.searchsorted(limits, np.unique(ordered), side="right")
    missing = [name for code, name in enumerate(SPLITS) if shares[code] > 0 and not (probe == code).any()]
    return limits, missing


def time_assigner(
    source: TableSource, column: str, shares: Sequence[float], seed: int, decimal: str = "."
) -> Assign:
    """Splits by time: the earliest rows are train, the latest test; equal times stay together.

    The limits are quantiles of a sample of at most 262,144 rows, and so exact up to that size.
    """
    sample, rows = RandomRows(1, make_rng(seed, "time sample"), _TIME_SAMPLE), 0
    for batch in source.batches([column]):
        found = _times(batch.column(column), decimal)
        if np.isnan(found).any():
            row = rows + int(np.isnan(found).argmax())
            raise DataError(
                f"{source} has no readable time in column {column}, data row {row + 1}; a split by time "
                f"needs a number or a date such as 2024-01-31 in every row: choose another column or split."
            )
        rows += len(found)
        sample.add(found[:, None])
    limits, missing = _limits(np.sort(sample.column(0)), shares)
    if missing:
        raise DataError(
            f"{source} has too few distinct times in column {column} for a split by time, as the "
            f"{missing[0]} split would be empty: choose another column or another split."
        )

    def assign(batch: pa.RecordBatch) -> SplitCodes:
        times = _times(batch.column(column), decimal)
        return np.searchsorted(limits, times, side="right").astype(np.int8)

    return assign


def _times(values: pa.Array, decimal: str) -> npt.NDArray[np.float64]:
    """Times as numbers: as they are, or days since 1970 for dates."""
    if is_date(values.type):
        return as_days(as_dates(values))
    numbers = as_numbers(values, decimal)
    return as_days(as_dates(values)) if np.isnan(numbers).all() else numbers
