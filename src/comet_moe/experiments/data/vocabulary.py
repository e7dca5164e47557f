"""The ids of a raw table and the contiguous numbers 0, 1, 2, ... that a model knows them by."""

import json
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from comet_moe.exceptions import DataError
from comet_moe.files import read_json

_INTEGER = re.compile(r"0|-?[1-9][0-9]*")


class Vocabulary:
    """An ordered set of ids; an id is its text, so ``7`` in a Parquet column and ``7`` in a CSV are the same.

    Example:
        >>> ids = Vocabulary.build(["b", "a", "b"])
        >>> ids.encode(["a", "b", "never seen"]).tolist()
        [0, 1, -1]
    """

    def __init__(self, ids: list[str]) -> None:
        self.ids = ids
        self._index = pd.Index(ids, dtype="str")
        if not self._index.is_unique:
            repeated = self._index[self._index.duplicated()][0]
            raise DataError(f"the vocabulary has the id {repeated!r} twice; every id must be unique.")

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def build(cls, values: npt.ArrayLike | pd.Series) -> "Vocabulary":
        """Collect the distinct ids of a column, sorted as numbers if all are integers, else as text."""
        ids = {id_text(value) for value in pd.unique(pd.Series(values))}
        numerical = all(_INTEGER.fullmatch(text) for text in ids)
        return cls(sorted(ids, key=int) if numerical else sorted(ids))

    def encode(self, values: npt.ArrayLike | pd.Series) -> npt.NDArray[np.int32]:
        """Map ids to their numbers, int32 of the same length; -1 for an id that is not in the vocabulary."""
        codes, distinct = pd.factorize(pd.Series(values))
        numbers = self._index.get_indexer(pd.Index([id_text(value) for value in distinct], dtype="str"))
        # factorize gives missing values the code -1, which picks the last of the numbers: the appended -1.
        return np.append(numbers, -1).astype(np.int32)[codes]

    def save(self, path: Path) -> None:
        """Write the ids in order as a JSON list."""
        path.write_text(json.dumps(self.ids, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """Read what ``save`` wrote."""
        return cls(read_json(path, list[str], DataError, "prepare the data set, or train the run, again"))


def id_text(value: object) -> str:
    """An id as text: 7.0 is "7", since pandas turns integers with a missing value into floats."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)
