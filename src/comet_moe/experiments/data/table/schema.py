"""What the user asks of a table, and what is learned of it on the train rows.

``TableOptions`` are the options in a recipe under ``data.options``. ``TableSchema`` has the features and
targets. It is written with the prepared arrays and with every run: new tables are encoded in the same way.
"""

import csv
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from comet_moe.exceptions import DataError
from comet_moe.files import describe

MISSING, UNKNOWN, RARE, FIRST_CATEGORY = range(4)
"""Codes of a categorical feature: no value; never seen in training; seen too rarely; the categories."""
MISSING_TEXTS = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "<NA>", "#N/A")
"""Texts of a CSV or TSV file that stand for a missing value."""

ColumnKind = Literal["categorical", "numeric", "date", "list", "text"]
TargetKind = Literal["binary", "multiclass", "regression", "count"]
TARGET_KINDS: tuple[str, ...] = get_args(TargetKind)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Feature(_Record):
    """One input of the model.

    Attributes:
        name: that of the column, with the part for a part of a date.
        column: the column it is read from.
        kind: "categorical", "numeric", "list" or "text".
        part: part of a date; None for other columns.
        decimal: the mark before the fraction of a number that is a text, "." or ",".
        categories: texts of the categories, whose codes begin at ``FIRST_CATEGORY``; terms of a text, whose
            codes begin at 0.
        rare: texts that were too rare for a code of their own, and share ``RARE``.
        edges: of the bins of a numeric feature, ascending; at least two.
        median, scale: of a numeric feature: half of the range that holds the middle half of its values.
        weights: of the terms of a text, larger for rarer ones.
        length: most elements of a list, or terms of a text.
    """

    name: str
    column: str
    kind: Literal["categorical", "numeric", "list", "text"]
    part: str | None = None
    decimal: str = "."
    categories: list[str] = []
    rare: list[str] = []
    edges: list[float] = []
    median: float = 0.0
    scale: float = 1.0
    weights: list[float] = []
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
        decimal: as of a feature.
        mean, std: of a regression target on the train rows, which it is standardised with; mean of a count.
        class_counts: train rows of each class.
        missing: train rows without a value, which have no loss.
    """

    name: str
    column: str
    kind: TargetKind
    classes: list[str] = []
    positive: str | None = None
    decimal: str = "."
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


class TargetOption(_Record):
    """How a target is read: its column, kind and, for one class against all others, that class."""

    column: str | None = None
    kind: TargetKind | None = None
    positive: str | None = None

    @field_validator("positive", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _as_names(value: Any) -> Any:
    """A list of names, also from one text with commas, where a name with a comma is in double quotes.

    A name that YAML reads as a number is a text.
    """
    if isinstance(value, int | float):
        value = str(value)
    if isinstance(value, str):
        return [name.strip() for name in next(csv.reader([value], skipinitialspace=True), []) if name.strip()]
    if isinstance(value, list):
        return [str(name) if isinstance(name, int | float) else name for name in value]
    return value


def _as_targets(value: Any) -> Any:
    """A mapping of task names to their options: from names, or from names with their kinds."""
    value = _as_names(value)
    if isinstance(value, list):
        return {name: {} for name in _once(value)}
    if isinstance(value, Mapping):
        return {
            str(name): {"kind": option} if isinstance(option, str) else option or {}
            for name, option in value.items()
        }
    return value


def _once(names: list[str]) -> list[str]:
    """ValueError for a name that is given twice."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice")
    return names


Names = Annotated[list[str], BeforeValidator(_as_names), AfterValidator(_once)]


class TableOptions(_Record):
    """The options of a table; docs/tables.md explains them."""

    targets: Annotated[dict[str, TargetOption], BeforeValidator(_as_targets)] = Field(min_length=1)
    columns: dict[str, ColumnKind] = {}
    features: Names | None = None
    exclude: Names = []
    shares: tuple[float, float, float] = (0.7, 0.15, 0.15)
    stratify: str | None = None
    group: str | None = None
    time: str | None = None
    validation: str | None = None
    test: str | None = None
    gauc: str | None = None
    key: str | None = None
    groups: Names = []
    copies: Literal["together", "anywhere"] = "together"
    min_count: int = Field(default=3, ge=1)
    max_categories: int = Field(default=100_000, ge=1)
    bins: int = Field(default=48, ge=2)
    text_terms: int = Field(default=5000, ge=1)
    list_length: int = Field(default=20, ge=1)
    list_separator: str = Field(default="|", min_length=1)
    encoding: str | None = None
    separator: str | None = Field(default=None, min_length=1, max_length=1)
    missing: list[str] = list(MISSING_TEXTS)

    @field_validator("shares")
    @classmethod
    def _check_shares(cls, shares: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
            raise ValueError("must be three positive numbers that sum to 1, such as [0.7, 0.15, 0.15]")
        return shares

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> "TableOptions":
        """Check the options of a request; DataError names the first that is wrong."""
        if options.get("targets") is None:
            raise DataError(
                "a table needs the names of its targets; give --set data.options.targets=[income,hours], or "
                "a recipe of `comet-moe data inspect TABLE --targets income,hours -o my.yaml`."
            )
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            raise DataError(f"option {describe(error)}.") from error


TABLE_OPTIONS: dict[str, Any] = {
    name: None if name == "targets" else field.get_default()
    for name, field in TableOptions.model_fields.items()
}
"""The options with their defaults, as the registry lists them."""
