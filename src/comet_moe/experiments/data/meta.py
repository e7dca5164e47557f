"""The metadata of a prepared data set, as they are written with it and with every run on it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from comet_moe.experiments.data.table.schema import TableSchema

Count = Annotated[int, Field(gt=0, lt=2**31)]


class DataMeta(BaseModel):
    """What is read of the metadata; a data set may have more, which is for readers.

    Attributes:
        name: of the data set.
        rows: of each split.
        notes: what a reader of the metrics should know.
        num_users, num_items, rating_mean, rating_std: of ratings.
        image_shape, classes: of images: channels, height and width; number of classes of each task.
        table: of a table.
        groups: columns that name groups of samples, with the names of the groups.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    name: str
    rows: dict[str, NonNegativeInt] = {}
    notes: list[str] = []
    num_users: Count | None = None
    num_items: Count | None = None
    rating_mean: float = 0.0
    rating_std: float = Field(default=1.0, ge=0)
    image_shape: tuple[Count, Count, Count] | None = None
    classes: dict[str, PositiveInt] | None = None
    table: TableSchema | None = None
    groups: dict[str, list[str] | None] = {}


class CacheMeta(DataMeta):
    """``meta.json`` of a prepared data set.

    Attributes:
        arrays: file of each array, by split, "features" or "targets", and name.
        vocabularies: file of the ids of a feature.
        files: size of each file in bytes.
        format: version of the layout of the files.
        source, sources, strict: where the raw files were, what they were, and whether their size was checked.
    """

    arrays: dict[str, dict[str, dict[str, str]]]
    vocabularies: dict[str, str] = {}
    files: dict[str, NonNegativeInt]
    format: int
    source: str | None = None
    sources: list[dict[str, Any]] = []
    strict: bool = True
