"""From the schema of a prepared table to the tasks and the input modules of its network."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe.exceptions import DataError, RecipeError
from comet_moe.experiments.config.schema import LossConfig, TableModelConfig
from comet_moe.experiments.data import Split
from comet_moe.experiments.data.table.schema import TableSchema, Target
from comet_moe.experiments.models import TableModel, Task
from comet_moe.experiments.models.table_inputs import (
    CategoricalEmbeddings,
    ListEmbeddings,
    PiecewiseLinearEmbeddings,
    ScaledNumbers,
    TableInput,
)
from comet_moe.files import validate


def read_schema(meta: Mapping[str, Any]) -> TableSchema:
    """The schema in the metadata of a prepared table."""
    remedy = "prepare the data set again"
    return validate(meta["table"], "the schema of the table", TableSchema, DataError, remedy)


def with_group_columns(split: Split, meta: Mapping[str, Any]) -> Split:
    """``split`` with the columns of the option ``groups`` of a table as targets, to group statistics by."""
    if "table" not in meta or not meta.get("groups"):
        return split
    names = [feature.name for feature in read_schema(meta).of_kind("categorical")]
    codes = split.features["categorical"]
    return replace(
        split, targets=split.targets | {name: codes[:, names.index(name)] for name in meta["groups"]}
    )


def table_tasks(schema: TableSchema, loss: LossConfig) -> list[Task]:
    """One task per target, with the weights of ``loss``."""
    names = [target.name for target in schema.targets]
    for setting, given in (("weights", loss.weights), ("class_weights", loss.class_weights)):
        unknown = next((name for name in given if name not in names), None)
        if unknown is not None:
            raise RecipeError(
                f"there is no setting loss.{setting}.{unknown}: the tasks are {', '.join(names)}"
            )
    if all(loss.weights.get(name) == 0 for name in names):
        raise RecipeError("loss.weights is 0 for every task: give at least one task a weight above 0")
    return [
        Task(
            target.name,
            target.kind,
            loss.weights.get(target.name, 1 / len(names)),
            outputs=len(target.classes) if target.kind == "multiclass" else 1,
            mean=target.mean if target.kind == "regression" else 0.0,
            std=target.std,
            has_missing=True,
            class_weights=_class_weights(target, loss.class_weights.get(target.name)),
            classes=tuple(target.classes),
        )
        for target in schema.targets
    ]


def _class_weights(target: Target, given: Any) -> tuple[float, ...] | None:
    """Weights with mean 1 over the train rows for "balanced", else as they are given, 1 where not."""
    if given is None:
        return None
    if not target.classes:
        raise RecipeError(f"loss.class_weights.{target.name} is for classes, not for {target.kind}")
    if given == "balanced":
        counts = [max(count, 1) for count in target.class_counts]
        return tuple(sum(counts) / (len(counts) * count) for count in counts)
    unknown = next((name for name in given if name not in target.classes), None)
    if unknown is not None:
        raise RecipeError(
            f"there is no setting loss.class_weights.{target.name}.{unknown}: the classes are "
            f"{', '.join(target.classes)}"
        )
    return tuple(given.get(name, 1.0) for name in target.classes)


def table_inputs(schema: TableSchema, shape: TableModelConfig) -> dict[str, TableInput]:
    """The modules that embed the arrays of a table, by the name of the array."""
    inputs: dict[str, TableInput] = {}
    categorical, numeric, lists = (schema.of_kind(kind) for kind in ("categorical", "numeric", "list"))
    if categorical:
        sizes = [feature.num_codes for feature in categorical]
        inputs["categorical"] = CategoricalEmbeddings(sizes, shape.embedding, shape.unknown_rate)
    if numeric and shape.numeric == "piecewise":
        edges = [feature.edges for feature in numeric]
        inputs["numeric"] = PiecewiseLinearEmbeddings(edges, shape.numeric_embedding)
    elif numeric:
        inputs["numeric"] = ScaledNumbers(
            [feature.median for feature in numeric], [feature.scale for feature in numeric]
        )
    if lists:
        inputs["lists"] = ListEmbeddings(
            [feature.num_codes for feature in lists],
            [feature.length for feature in lists],
            shape.embedding,
        )
    return inputs


def key_column(schema: TableSchema) -> tuple[int, int] | None:
    """Index and number of codes of the categorical feature that hash gates route by, or None."""
    for index, feature in enumerate(schema.of_kind("categorical")):
        if feature.name == schema.key:
            return index, feature.num_codes
    return None


def start_at_base_rates(model: TableModel, targets: Sequence[Target]) -> None:
    """Set the biases of the towers so that the first predictions are near the means of the train rows."""
    for head, target in zip(model.heads, targets, strict=True):
        if target.kind == "regression":
            continue
        if target.kind == "count":
            rates = [log(max(target.mean, 1e-3))]
        else:
            logs = [log((count + 1) / (sum(target.class_counts) + 1)) for count in target.class_counts]
            rates = [logs[1] - logs[0]] if target.kind == "binary" else logs
        assert isinstance(head, nn.Sequential)
        last = head[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.bias.copy_(torch.tensor(rates))


def example_table(schema: TableSchema, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random arrays of features of ``rows`` rows."""
    features: dict[str, Tensor] = {}
    categorical, numeric, lists = (schema.of_kind(kind) for kind in ("categorical", "numeric", "list"))
    if categorical:
        codes = [torch.randint(feature.num_codes, (rows,), generator=generator) for feature in categorical]
        features["categorical"] = torch.stack(codes, 1).int()
    if numeric:
        low, high = (torch.tensor([feature.edges[index] for feature in numeric]) for index in (0, -1))
        features["numeric"] = low + (high - low) * torch.rand(rows, len(numeric), generator=generator)
    if lists:
        codes = [
            torch.randint(feature.num_codes, (rows, feature.length), generator=generator) for feature in lists
        ]
        features["lists"] = torch.cat(codes, 1).int()
    return features
