"""Equal rows of a table: how many there are, and whether they are copies.

Rows of a few categories are equal by chance. Equal rows are copies if two things hold. A column tells the
distinct rows apart: at least half of them have a value of their own in it. And pairs of equal rows are more
frequent than if the columns were independent. The number of equal rows comes from rows whose key, a hash of
their values, is below a limit. Of equal rows that takes all or none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from comet_moe.experiments.data.splits import make_rng
from comet_moe.experiments.data.table.source import TableSource
from comet_moe.experiments.data.table.values import as_numbers, is_list, is_number

Keys = npt.NDArray[np.uint64]

SAMPLE_ROWS = 50_000
"""Most rows of the sample, about."""
SAMPLE_VALUES, SAMPLE_BYTES = 2**23, 2**24
"""Most values and bytes of the sample, about."""
MAX_KEYS = 2**18
"""About as many keys are kept, so that numbers are exact up to that many rows."""
FEWEST_COPIES = 0.001
"""Copies count from this share of the rows on."""
_FEWEST_ROWS = 20
_MORE_THAN_CHANCE = 3
_PRIME = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Copies:
    """Rows that repeat another one in the features and the targets.

    Attributes:
        columns: those that are compared.
        keys: of the rows below the limit, each as often as its row is there.
        count: rows that repeat an earlier one, estimated in a large table.
    """

    columns: list[str]
    keys: Keys
    count: int


@dataclass(frozen=True)
class RowSample:
    """Random rows of a table, of which equal ones are there once, and the copies in the whole table."""

    table: pa.Table
    copies: Copies | None


def sample_rows(source: TableSource, columns: Sequence[str], others: Sequence[str], rows: int) -> RowSample:
    """One pass over the table of ``rows`` rows; ``columns`` are compared, ``others`` only sampled."""
    rng = make_rng(0, "inspect")
    names = list(dict.fromkeys([*columns, *others]))
    share: float | None = None
    limit = np.uint64(min(MAX_KEYS / rows, 1.0) * float(2**64 - 2**11))
    tables: list[pa.Table] = []
    keys: list[Keys] = []
    of_tables: list[Keys] = []
    for batch in source.batches(names):
        if share is None:
            by_size = SAMPLE_BYTES * batch.num_rows // max(batch.nbytes, 1)
            share = min(SAMPLE_ROWS, SAMPLE_VALUES // len(names), by_size) / rows
        own = row_keys(batch.select(list(columns)))
        chosen = rng.random(len(own)) < share
        tables.append(pa.Table.from_batches([batch.filter(pa.array(chosen))]))
        of_tables.append(own[chosen])
        keys.append(own[own <= limit])
    table = pa.concat_tables(tables, promote_options="permissive")
    _, first, counts = np.unique(np.concatenate(of_tables), return_index=True, return_counts=True)
    distinct = table.take(pa.array(np.sort(first)))
    kept = np.concatenate(keys)
    count = rows * (len(kept) - len(np.unique(kept))) / max(len(kept), 1)
    values = [name for name in columns if not is_list(table.schema.field(name).type)]
    are_copies = (
        count >= FEWEST_COPIES * rows
        and _are_told_apart(distinct.select(values))
        and _equal_pairs(counts) > _MORE_THAN_CHANCE * _equal_by_chance(table.select(values))
    )
    return RowSample(distinct, Copies(list(columns), kept, round(count)) if are_copies else None)


def _are_told_apart(distinct: pa.Table) -> bool:
    return distinct.num_rows >= _FEWEST_ROWS and any(
        2 * pc.count_distinct(column).as_py() >= distinct.num_rows for column in distinct.columns
    )


def _equal_by_chance(table: pa.Table) -> float:
    """The share of pairs of rows that would be equal if the columns were independent."""
    counts = (pc.value_counts(column).field("counts").to_numpy() for column in table.columns)
    return prod(_equal_pairs(own) for own in counts)


def _equal_pairs(counts: npt.NDArray[np.int64]) -> float:
    """The share of pairs that are equal, from the rows of each distinct value."""
    rows = int(counts.sum())
    return float((counts * (counts - 1.0)).sum() / max(rows * (rows - 1), 1))


def row_keys(batch: pa.RecordBatch) -> Keys:
    """(B,) hashes of rows, the same for rows that are equal as they are written."""
    keys = np.zeros(batch.num_rows, dtype=np.uint64)
    for column in batch.columns:
        keys = (keys ^ _hashes(column)) * _PRIME
    return pd.util.hash_array(keys)


def _hashes(values: pa.Array) -> Keys:
    if is_number(values.type):
        return pd.util.hash_array(as_numbers(values))
    if is_list(values.type):
        values = pa.array([None if own is None else str(own) for own in values.to_pylist()], pa.string())
    if not pa.types.is_dictionary(values.type):
        values = values.dictionary_encode()
    texts = np.array([str(value) for value in values.dictionary.to_pylist()], dtype=object)
    codes = pc.fill_null(values.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.append(pd.util.hash_array(texts, categorize=False), np.uint64(0))[codes]
