"""The schema of a prepared table: its features and targets, and what was learned of them on the train rows.

It is written with the prepared arrays and with every run, so that new tables are encoded in the same way.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

MISSING, UNKNOWN, RARE, FIRST_CATEGORY = range(4)
"""Codes of a categorical feature: no value; never seen in training; seen too rarely; the categories."""

TargetKind = Literal["binary", "multiclass", "regression", "count"]
TARGET_KINDS = ("binary", "multiclass", "regression", "count")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Feature(_Record):
    """One input of the model.

    Attributes:
        name: that of the column, with the part for a part of a date.
        column: the column it is read from.
        kind: "categorical", "numeric" or "list".
        part: part of a date; None for other columns.
        categories: texts of the categories, whose codes begin at ``FIRST_CATEGORY``.
        rare: texts that were too rare for a code of their own, and share ``RARE``.
        edges: of the bins of a numeric feature, ascending; at least two.
        median, scale: of a numeric feature: half of the range that holds the middle half of its values.
        length: most elements of a list.
    """

    name: str
    column: str
    kind: Literal["categorical", "numeric", "list"]
    part: str | None = None
    categories: list[str] = []
    rare: list[str] = []
    edges: list[float] = []
    median: float = 0.0
    scale: float = 1.0
    length: int = 0

    @property
    def num_codes(self) -> int:
        """Codes of a categorical feature or of a list's elements."""
        return FIRST_CATEGORY + len(self.categories)


class Target(_Record):
    """One output of the model.

    Attributes:
        name: of the task.
        column: the column it is read from.
        kind: "binary", "multiclass", "regression" or "count".
        classes: texts of the classes in order; of a binary target the second one is predicted.
        positive: the class whose probability is predicted, all other values being the other class; None if
            the column has two values.
        mean, std: of a regression target on the train rows, which it is standardised with; mean of a count.
        class_counts: train rows of each class.
        missing: train rows without a value, which have no loss.
    """

    name: str
    column: str
    kind: TargetKind
    classes: list[str] = []
    positive: str | None = None
    mean: float = 0.0
    std: float = 1.0
    class_counts: list[int] = []
    missing: int = 0


class TableSchema(_Record):
    """Features and targets of a prepared table.

    Attributes:
        features: in the order of their arrays.
        targets: one per task.
        key: the categorical feature that hash gates route by, or None.
        gauc: the column whose values group the rows for the grouped AUC, or None.
        list_separator: between the elements of a list that is written as text.
    """

    features: list[Feature]
    targets: list[Target]
    key: str | None = None
    gauc: str | None = None
    list_separator: str = "|"

    def of_kind(self, kind: str) -> list[Feature]:
        """The features of one kind, in order."""
        return [feature for feature in self.features if feature.kind == kind]

    @property
    def feature_columns(self) -> list[str]:
        """The columns that the features are read from, each once."""
        return list(dict.fromkeys(feature.column for feature in self.features))
