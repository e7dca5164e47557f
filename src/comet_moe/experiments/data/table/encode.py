"""Rows of a table as the arrays of a model, by the schema of the table.

Arrays of features, each only if there is such a feature:

- ``categorical`` int32 (B, C): codes.
- ``numeric`` float32 (B, Q): raw numbers, NaN for missing ones.
- ``lists`` int32 (B, L): codes of all lists side by side, with -1 as padding.
- ``texts`` int32 (B, L): codes of the terms of all text columns side by side, with -1 as padding.
- ``group`` int64 (B,): hashes of the column of the grouped AUC.

Targets are float32 (B,), NaN for missing ones.
"""

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from comet_moe.exceptions import DataError
from comet_moe.experiments.data.table.schema import (
    FIRST_CATEGORY,
    MISSING,
    RARE,
    UNKNOWN,
    Feature,
    TableSchema,
    Target,
)
from comet_moe.experiments.data.table.text import TermEncoder
from comet_moe.experiments.data.table.values import (
    as_categories,
    as_dates,
    as_days,
    as_lists,
    as_numbers,
    date_part,
    is_list,
    is_readable,
    is_text,
)

Array = npt.NDArray[Any]

LARGEST = 1e37
"""Larger numbers are clipped to it: differences of two such numbers are finite in float32."""


class Encoder:
    """Encodes batches of a table.

    Args:
        schema: of the prepared table.

    Attributes:
        unknown: rows (elements, of a list) with a category that was never seen in training, by feature.
        not_numbers: rows with a text in place of a number, which count as missing, by feature.
        numbers: rows with a number in a column of texts, by feature.
    """

    def __init__(self, schema: TableSchema):
        self.schema = schema
        self.unknown: Counter[str] = Counter()
        self.not_numbers: Counter[str] = Counter()
        self.numbers: Counter[str] = Counter()
        self._codes = {
            feature.name: {
                **dict.fromkeys(feature.rare, RARE),
                **{text: FIRST_CATEGORY + index for index, text in enumerate(feature.categories)},
            }
            for feature in schema.features
            if feature.kind in ("categorical", "list")
        }
        self._terms = {feature.name: TermEncoder(feature) for feature in schema.of_kind("text")}
        self._classes = {
            target.name: {text: float(index) for index, text in enumerate(target.classes)}
            for target in schema.targets
        }

    def features(self, batch: pa.RecordBatch, with_group: bool = True) -> dict[str, Array]:
        """The arrays of features of the rows of ``batch``, which has the schema's columns."""
        schema = self.schema
        arrays: dict[str, list[Array]] = {"categorical": [], "numeric": [], "lists": [], "texts": []}
        for feature in schema.features:
            values = batch.column(feature.column)
            _check_type(feature, values.type)
            if feature.kind == "numeric":
                arrays["numeric"].append(self._encode_numbers(feature, values))
            elif feature.kind == "categorical":
                arrays["categorical"].append(self._encode(feature, *feature_categories(feature, values)))
            elif feature.kind == "text":
                arrays["texts"].append(self._encode_terms(feature, values))
            else:
                arrays["lists"].append(self._encode_lists(feature, values))
        encoded = {name: np.column_stack(columns) for name, columns in arrays.items() if columns}
        if schema.gauc is not None and with_group:
            encoded["group"] = hash_groups(batch.column(schema.gauc))
        return encoded

    def require_numbers(self, source: object) -> None:
        """Raise DataError if a numeric column of the rows so far, which are of ``source``, has texts only."""
        for feature in self.schema.of_kind("numeric"):
            if self.not_numbers[feature.name] and not self.numbers[feature.name]:
                raise DataError(
                    f"{source} has {self.not_numbers[feature.name]:,} texts and no number in column "
                    f"{feature.column}, which has numbers in the table of the training; give numbers written "
                    f"as there."
                )

    def targets(self, batch: pa.RecordBatch) -> dict[str, Array]:
        """The targets of the rows of ``batch``, by task; regression targets are standardised."""
        return {
            target.name: self._encode_target(target, batch.column(target.column)).astype(np.float32)
            for target in self.schema.targets
        }

    def _encode(self, feature: Feature, codes: Array, texts: list[str]) -> Array:
        known = self._codes[feature.name]
        numbers = np.array([*(known.get(text, UNKNOWN) for text in texts), MISSING], dtype=np.int32)
        encoded = numbers[codes]
        _count(self.unknown, feature, int((encoded == UNKNOWN).sum()))
        return encoded

    def _encode_numbers(self, feature: Feature, values: pa.Array) -> Array:
        numbers = feature_numbers(feature, values)
        if is_text(values.type):
            present = len(numbers) - int(np.isnan(numbers).sum())
            _count(self.numbers, feature, present)
            _count(self.not_numbers, feature, len(numbers) - values.null_count - present)
        numbers[np.isinf(numbers)] = np.nan
        return numbers.astype(np.float32)

    def _encode_lists(self, feature: Feature, values: pa.Array) -> Array:
        lengths, codes, texts = as_lists(values, self.schema.list_separator)
        elements = self._encode(feature, codes, texts)
        padded = np.full((len(lengths), feature.length), -1, dtype=np.int32)
        row = np.repeat(np.arange(len(lengths)), lengths)
        position = np.arange(len(elements)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        kept = position < feature.length
        padded[row[kept], position[kept]] = elements[kept]
        padded[lengths == 0, 0] = MISSING
        return padded

    def _encode_terms(self, feature: Feature, values: pa.Array) -> Array:
        codes, texts = as_categories(values)
        return self._terms[feature.name].encode([*texts, ""])[codes]

    def _encode_target(self, target: Target, values: pa.Array) -> npt.NDArray[np.float64]:
        if target.kind in ("regression", "count"):
            numbers = as_numbers(values, target.decimal)
            if np.isinf(numbers).any():
                raise DataError(f"the target {target.name} has an infinite value; correct or remove it.")
            return (numbers - target.mean) / target.std if target.kind == "regression" else numbers
        codes, texts = as_categories(values)
        if target.positive is not None:
            numbers = np.array([*(float(text == target.positive) for text in texts), np.nan])
        else:
            classes = self._classes[target.name]
            new = next((text for text in texts if text not in classes), None)
            if new is not None:  # in a table of its own for validation or test
                raise DataError(
                    f"the target {target.name} has the class {new!r}, which is not among those to train on: "
                    f"{', '.join(target.classes)}."
                )
            numbers = np.array([*(classes[text] for text in texts), np.nan])
        return numbers[codes]


def _count(counts: Counter[str], feature: Feature, rows: int) -> None:
    if rows:
        counts[feature.name] += rows


def _check_type(feature: Feature, kind: pa.DataType) -> None:
    """A new table may have other types than the one of the training, but no lists in place of values."""
    if not is_readable(kind) or (is_list(kind) and feature.kind != "list"):
        raise DataError(
            f"the column {feature.column} has values of type {kind}, where the model was trained on a "
            f"{feature.kind} feature; give single numbers or texts."
        )


def feature_numbers(feature: Feature, values: pa.Array) -> npt.NDArray[np.float64]:
    """The numbers of a numeric feature, (B,), within ``LARGEST`` unless they are infinite."""
    is_date = feature.part == "days"
    numbers = as_days(as_dates(values)) if is_date else as_numbers(values, feature.decimal)
    return np.where(np.isinf(numbers), numbers, np.clip(numbers, -LARGEST, LARGEST))


def feature_categories(feature: Feature, values: pa.Array) -> tuple[Array, list[str]]:
    """The categories of a categorical feature: indices (B,) into texts, -1 where one is missing."""
    return as_categories(values) if feature.part is None else date_part(as_dates(values), feature.part)


def hash_groups(values: pa.Array) -> npt.NDArray[np.int64]:
    """A number (B,) for each value, the same for equal values in all tables; 0 for missing ones."""
    codes, texts = as_categories(values)
    hashes = pd.util.hash_array(np.array(texts, dtype=object), categorize=False).view(np.int64)
    return np.append(hashes, np.int64(0))[codes]
