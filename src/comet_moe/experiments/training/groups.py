"""What experts specialise in: the weight that each group of samples gives to each expert of a gate.

A grouping is a column of the data: the class of a task, or what ``Dataset.meta["groups"]`` names, a mapping
from the name of a feature or target to the labels of its values 0, 1, ..., or to None, where each value is
its own label. A column that is there only to group samples is best a target: models read targets by name, and
no other than those of their tasks.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import Split
from comet_moe.experiments.training.records import GroupsRecord
from comet_moe.routing import Routing
from comet_moe.statistics import GroupStatistics

Groups = Mapping[str, Sequence[str] | None]
"""Names of columns, each with the labels of its values, or None."""

MAX_GROUPS = 30
"""Groups of a column, the largest ones; all others are one group, "other"."""


class Grouping:
    """The group of every row of a split by one column.

    Args:
        name: name of the column, a feature or target of ``split``.
        split: the rows.
        labels: labels of the values 0, 1, ...; None if each value is its own label.

    Attributes:
        labels: labels of the groups in the order of their values; the last is "other" if some are pooled.
    """

    def __init__(self, name: str, split: Split, labels: Sequence[str] | None = None):
        columns = {**split.features, **split.targets}
        if name not in columns or columns[name].ndim != 1:
            raise DataError(
                f"the data set groups its rows by {name!r}, which is none of its columns of single values: "
                f"{', '.join(key for key, column in columns.items() if column.ndim == 1) or 'none'}."
            )
        self.name = name
        self._column = columns[name]
        values, counts = np.unique(self._column, return_counts=True)
        largest = np.argsort(-counts, kind="stable")[:MAX_GROUPS]
        self._values = values[np.sort(largest)]
        self.labels = [_label(value, labels) for value in self._values.tolist()]
        if len(values) > MAX_GROUPS:
            self.labels.append("other")

    def groups(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """(stop - start,) the group of each of these rows, as a position in ``labels``."""
        column = np.asarray(self._column[start:stop])
        position = np.searchsorted(self._values, column).clip(max=len(self._values) - 1)
        own = self._values[position]
        is_own = (own == column) | ((own != own) & (column != column))  # NaN, a missing class, is a group too
        return np.where(is_own, position, len(self._values)).astype(np.int64)


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
            statistics.add(routing, torch.from_numpy(grouping.groups(start, start + rows)))

    def records(self) -> dict[str, GroupsRecord]:
        """By the name of the column."""
        return {
            grouping.name: GroupsRecord(labels=grouping.labels, **statistics.result())
            for grouping, statistics in self._parts
        }
