"""Groups of samples, by which the use of the experts and the routing gain are recorded.

A grouping is a column of the data: the class of a task, or one that ``Dataset.meta["groups"]`` names. That
maps the name of a feature or target to labels of its values 0, 1, ... None in place of labels means that each
value is its own label.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import Split
from comet_moe.experiments.models import Task
from comet_moe.experiments.models.base import read_schema
from comet_moe.experiments.training.records import GroupsRecord
from comet_moe.routing import Routing
from comet_moe.statistics import GroupStatistics

Groups = Mapping[str, Sequence[str] | None]
"""Names of columns, each with the labels of its values, or None."""

MAX_GROUPS = 30
"""Groups of a column, the largest ones; all others are one group, "other"."""


def with_group_columns(split: Split, meta: Mapping[str, Any]) -> Split:
    """``split`` with the columns of the option ``groups`` of a table as targets, to group statistics by."""
    if "table" not in meta or not meta.get("groups"):
        return split
    names = [feature.name for feature in read_schema(meta).of_kind("categorical")]
    codes = split.features["categorical"]
    return replace(
        split, targets=split.targets | {name: codes[:, names.index(name)] for name in meta["groups"]}
    )


class Grouping:
    """The group of every row of a split by one column.

    Args:
        name: name of the column, a feature or target of ``split``.
        split: the rows.
        labels: labels of the values 0, 1, ...; None if each value is its own label.

    Attributes:
        labels: labels of the groups in the order of their values; the last is "other" if some are pooled.
        groups: (N,) the group of each row, as a position in ``labels``.
    """

    def __init__(self, name: str, split: Split, labels: Sequence[str] | None = None):
        columns = {**split.features, **split.targets}
        if name not in columns or columns[name].ndim != 1:
            raise DataError(
                f"the data set groups its rows by {name!r}, which is none of its columns of single values: "
                f"{', '.join(key for key, column in columns.items() if column.ndim == 1) or 'none'}."
            )
        self.name = name
        # NaN, a missing class, is a value too.
        values, codes, counts = np.unique(columns[name], return_inverse=True, return_counts=True)
        largest = np.sort(np.argsort(-counts, kind="stable")[:MAX_GROUPS])
        self.labels = [_label(value, labels) for value in values[largest].tolist()]
        if len(values) > MAX_GROUPS:
            self.labels.append("other")
        positions = np.full(len(values), MAX_GROUPS)
        positions[largest] = np.arange(len(largest))
        self.groups = positions[codes]


def _label(value: object, labels: Sequence[str] | None) -> str:
    if value != value:
        return "missing"
    if labels is not None and isinstance(value, int | float) and 0 <= value < len(labels):
        return labels[int(value)]
    return f"{value:g}" if isinstance(value, float) else str(value)


class GateGroups:
    """The statistics of one gate by each of some groupings."""

    def __init__(self, groupings: Sequence[Grouping]):
        self._parts = [(grouping, GroupStatistics(len(grouping.labels))) for grouping in groupings]

    def add(self, routing: Routing, start: int) -> None:
        """Add the routing of the rows of the split from ``start`` on."""
        rows = routing.batch_shape[0]
        for grouping, statistics in self._parts:
            statistics.add(routing, torch.from_numpy(grouping.groups[start : start + rows]))

    def records(self) -> dict[str, GroupsRecord]:
        """By the name of the column."""
        return {
            grouping.name: GroupsRecord(labels=grouping.labels, **statistics.result())
            for grouping, statistics in self._parts
        }


def make_groupings(tasks: Sequence[Task], split: Split, groups: Groups | None) -> dict[str, Grouping]:
    """By name: the class of each task that has classes, and the columns of ``groups``; none for None."""
    if groups is None or not len(split):
        return {}
    classes = {task.name: task.classes or None for task in tasks if task.kind in ("binary", "multiclass")}
    return {name: Grouping(name, split, labels) for name, labels in {**classes, **groups}.items()}


def gate_groups(tasks: Sequence[Task], split: Split, groups: Groups | None) -> dict[str, GateGroups]:
    """For each task, how its gate's statistics are grouped; a classification task by its class, too."""
    if groups is None or not len(split):
        return {}
    groupings = make_groupings(tasks, split, groups)
    return {
        task.name: GateGroups([groupings[name] for name in groupings if name in groups or name == task.name])
        for task in tasks
    }
