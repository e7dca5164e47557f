"""The tasks of a model, with their losses.

A loss is a sum and a count, so that batches, and the shards of several processes, add up exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from comet_moe.exceptions import DataError, RecipeError
from comet_moe.experiments.config.schema import LossConfig
from comet_moe.experiments.data.table.schema import TableSchema, Target
from comet_moe.files import validate


@dataclass(frozen=True)
class Task:
    """One target.

    Attributes:
        name: name of the target.
        kind: "binary" (cross-entropy on a logit), "multiclass" (cross-entropy on logits), "regression"
            (squared error) or "count" (negative Poisson log-likelihood). The output for a count is the
            logarithm of the mean.
        weight: factor of the task's loss in the total loss.
        outputs: width of the output of the head.
        where: name of a target with the weight of each row, such as 0 and 1; rows of weight 0 are left out.
        mean, std: those that a "regression" target was standardised with, in the units of the raw data.
        has_missing: whether targets may be NaN, which is a missing one: the row has no loss.
        class_weights: factor of the loss of the rows of each class; None for 1.
        classes: names of the classes, where they are known.

    Example:
        >>> import torch
        >>> from comet_moe.experiments.models import Task
        >>> task = Task("rating", "regression", weight=0.5, where="watched")
        >>> output = torch.tensor([[3.0], [5.0], [1.0]])
        >>> targets = {"rating": torch.tensor([4.0, 5.0, 0.0]), "watched": torch.tensor([1, 1, 0])}
        >>> task.loss(output, targets)
        (tensor(1.), tensor(2.))
        >>> Task("rating", "regression", weight=0.5, mean=3.5, std=2.0).predict(output)
        tensor([ 9.5000, 13.5000,  5.5000])
    """

    name: str
    kind: Literal["binary", "multiclass", "regression", "count"]
    weight: float
    outputs: int = 1
    where: str | None = None
    mean: float = 0.0
    std: float = 1.0
    has_missing: bool = False
    class_weights: tuple[float, ...] | None = None
    classes: tuple[str, ...] = ()

    def predict(self, output: Tensor) -> Tensor:
        """What the output of the head says, in the units of the data.

        Returns:
            Probabilities (B,) of class 1 for "binary", (B, classes) for "multiclass"; numbers (B,) for
            "regression" and "count".
        """
        if self.kind == "multiclass":
            return output.softmax(-1)
        output = output.squeeze(-1)
        if self.kind == "binary":
            return output.sigmoid()
        return output.exp() if self.kind == "count" else output * self.std + self.mean

    def loss(self, output: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum of the losses over the rows that count, and their number: (B, outputs) -> (), ()."""
        losses, counted = self.row_losses(output, targets)
        if counted is None:
            return losses.sum(), losses.new_full((), len(losses))
        return (losses * counted).sum(), counted.sum()

    def row_losses(self, output: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The loss of each row and how much the row counts, None for 1: (B, outputs) -> (B,), (B,)."""
        target = targets[self.name]
        counted = None if self.where is None else targets[self.where].to(output.dtype)
        if self.has_missing:
            is_present = ~target.isnan()
            counted = is_present.to(output.dtype) if counted is None else counted * is_present
        if counted is not None:
            is_counted = counted != 0
            # Before the loss, not after it: a NaN times 0 would be NaN, and so would its gradient.
            output = torch.where(is_counted.unsqueeze(-1), output, 0)
            target = torch.where(is_counted, target, 0)
        if self.class_weights is not None:
            # Made on the device, because a copy from the host would wait for it.
            weights = torch.stack([output.new_full((), weight) for weight in self.class_weights])
            factors = weights[target.long()]
            counted = factors if counted is None else counted * factors
        return self._losses(output, target), counted

    def _losses(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of each row: (B, outputs), (B,) -> (B,)."""
        if self.kind == "multiclass":
            return F.cross_entropy(output, target.long(), reduction="none")
        output, target = output.squeeze(-1), target.to(output.dtype)
        if self.kind == "binary":
            return F.binary_cross_entropy_with_logits(output, target, reduction="none")
        if self.kind == "count":
            # log y! does not depend on the output, but without it the loss may be negative, and a task that
            # is weighted by its uncertainty would lower the total loss without end.
            losses = F.poisson_nll_loss(output, target, log_input=True, reduction="none")
            return losses + torch.lgamma(target + 1)
        return (output - target).square()


def rating_tasks(alpha: float, mean: float = 0.0, std: float = 1.0) -> list[Task]:
    """α·BCE(watched) + (1-α)·MSE(rating), the rating over watched rows only.

    ``mean`` and ``std`` are those of the raw ratings, if the ratings of the data are standardised.
    """
    return [
        Task("watched", "binary", alpha),
        Task("rating", "regression", 1 - alpha, where="watched", mean=mean, std=std),
    ]


def image_tasks(classes: dict[str, int]) -> list[Task]:
    """One classification task per target, all of the same weight; two classes are one logit."""
    weight = 1 / len(classes)
    return [
        Task(name, "binary", weight) if count == 2 else Task(name, "multiclass", weight, outputs=count)
        for name, count in classes.items()
    ]


def read_schema(meta: Mapping[str, Any]) -> TableSchema:
    """The schema in the metadata of a prepared table."""
    remedy = "prepare the data set again"
    return validate(meta["table"], "the schema of the table", TableSchema, DataError, remedy)


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
