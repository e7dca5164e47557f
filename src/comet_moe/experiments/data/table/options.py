"""The options of a table, as they are given in a recipe under ``data.options``, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

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
from comet_moe.experiments.data.table.scan import ColumnKind
from comet_moe.experiments.data.table.schema import TargetKind
from comet_moe.experiments.data.table.source import MISSING_TEXTS
from comet_moe.files import field_name


class TargetOption(BaseModel):
    """How a target is read: its column, kind and, for one class against all others, that class."""

    model_config = ConfigDict(extra="forbid")

    column: str | None = None
    kind: TargetKind | None = None
    positive: str | None = None

    @field_validator("positive", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _as_names(value: Any) -> Any:
    """A list of names, also from one text with commas; a name that YAML reads as a number is a text."""
    if isinstance(value, int | float):
        value = str(value)
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
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
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice")
    return names


Names = Annotated[list[str], BeforeValidator(_as_names), AfterValidator(_once)]


class TableOptions(BaseModel):
    """The options of a table; docs/tables.md explains them."""

    model_config = ConfigDict(extra="forbid")

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
    min_count: int = Field(default=3, ge=1)
    max_categories: int = Field(default=100_000, ge=1)
    bins: int = Field(default=48, ge=2)
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
    def read(cls, options: Mapping[str, Any]) -> TableOptions:
        """Check the options of a request; DataError names the first that is wrong."""
        if options.get("targets") is None:
            raise DataError(
                "a table needs the names of its targets; give --set data.options.targets=[income,hours], or "
                "a recipe of `comet-moe data inspect TABLE --targets income,hours -o my.yaml`."
            )
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            name = field_name(problem["loc"])
            reason = problem["msg"].removeprefix("Value error, ")
            raise DataError(
                f"option {name} of the table is {problem['input']!r}: {reason[0].lower()}{reason[1:]}."
            ) from error


TABLE_OPTIONS: dict[str, Any] = {
    name: None if name == "targets" else field.get_default()
    for name, field in TableOptions.model_fields.items()
}
"""The options with their defaults, as the registry lists them."""
