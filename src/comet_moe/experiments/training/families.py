"""What the families of baselines share: the rows of a fit, and what each family offers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from comet_moe.experiments.data.table.schema import TableSchema
from comet_moe.experiments.models import Task

Array = npt.NDArray[Any]

LIST_ELEMENTS = 30
"""The most frequent elements of a list, each of which is a column."""


@dataclass(frozen=True)
class FitData:
    """Inputs and targets (N,) of one task on the train and the validation split; NaN is a missing target."""

    inputs: Any
    targets: Array
    held_out_inputs: Any
    held_out_targets: Array

    def present(self) -> "FitData":
        """The rows that have a target; of a validation row also one that the train rows have."""
        rows, held_out = ~np.isnan(self.targets), ~np.isnan(self.held_out_targets)
        return FitData(
            self.inputs[rows],
            self.targets[rows],
            self.held_out_inputs[held_out],
            self.held_out_targets[held_out],
        )

    def with_known_classes(self) -> "FitData":
        """Without validation rows of a class that no train row has, which cannot be scored."""
        known = np.isin(self.held_out_targets, np.unique(self.targets))
        return FitData(self.inputs, self.targets, self.held_out_inputs[known], self.held_out_targets[known])


class Family(Protocol):
    """A kind of baseline, with one model per task.

    Attributes:
        types: what its file may hold beyond the types that skops trusts by itself.
    """

    types: frozenset[str]

    def inputs(self, features: Mapping[str, Array], schema: TableSchema) -> Any:
        """The encoded columns (N, columns) as the models read them."""

    def fit(self, task: Task, data: FitData, schema: TableSchema, seconds: float | None) -> tuple[Any, bool]:
        """A model, and whether it has converged within ``seconds``."""

    def outputs(self, task: Task, model: Any, inputs: Any) -> Array:
        """(N, outputs) in the form of a head's output: logits, standardised numbers, or logs of counts."""

    def check(self, task: Task, model: Any, schema: TableSchema) -> Any:
        """A model from a file, ready to predict; ValueError for one that does not fit task and table."""


def list_columns(features: Mapping[str, Array], schema: TableSchema) -> list[Array]:
    """For each list (N, elements) float64: which of its most frequent elements a row has."""
    parts, first = [], 0
    for feature in schema.of_kind("list"):
        codes = np.asarray(features["lists"])[:, first : first + feature.length]
        first += feature.length
        frequent = range(num_elements(feature.num_codes))
        parts.append(np.stack([(codes == code).any(1) for code in frequent], 1).astype(float))
    return parts


def num_elements(num_codes: int) -> int:
    """How many elements of a list with this number of codes have a column."""
    return min(num_codes, LIST_ELEMENTS)
