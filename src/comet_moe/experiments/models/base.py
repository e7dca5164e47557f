"""What every network of a recipe offers, the layers that they share, and their tasks with their losses.

Training, evaluation, prediction and export use a network through :class:`Model` alone. A network says how
features become one vector per row (:meth:`Model.embed`); mixture, gates and heads are the same for all. A
loss is a sum and a count, so that batches, and the shards of several processes, add up exactly.

Shapes: B rows, p features that the mixture reads.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe.exceptions import DataError, RecipeError
from comet_moe.experiments.config.schema import LossConfig
from comet_moe.experiments.data.table.schema import TableSchema, Target
from comet_moe.experts.base import count_linear_flops
from comet_moe.files import validate
from comet_moe.mixture.moe import MultiGateMoE
from comet_moe.mixture.ple import CGC, PLE
from comet_moe.routing import Routing


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

    @property
    def has_classes(self) -> bool:
        """Whether its target is a class."""
        return self.kind in ("binary", "multiclass")

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
        losses, counts = self.row_losses(output, targets)
        return losses.sum(), counts.sum()

    def mean_row_losses(self, output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """(B,) the losses of rows whose mean is the loss of the task; 0 for rows that do not count."""
        losses, counts = self.row_losses(output, targets)
        return losses * (len(losses) / counts.sum().clamp_min(1))

    def row_losses(self, output: Tensor, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss of each row times its weight, and the weight, 0 where it does not count: (B,), (B,)."""
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
        losses = self._losses(output, target)
        if counted is None:
            return losses, torch.ones_like(losses)
        return losses * counted, counted

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


Mixture = MultiGateMoE | CGC | PLE


class Model(nn.Module, ABC):
    """A mixture of experts over embedded features, with one head per task.

    Args:
        tasks: the targets to predict.
        moe: the mixture, with one output per task.
        expert_units: outputs of an expert.
        head_units: widths of each head's ReLU layers.
        inputs: the modules that embed the features, by the name of their attribute.

    Attributes:
        kind: the value of ``model.kind`` in a configuration.
        has_table_metrics: whether tasks have the metrics of tables, with confidence intervals.
        gate_names: names of the gates, in the order of their routings; the gate of a task has its name.
    """

    kind: ClassVar[Literal["rating", "image", "table"]]
    has_table_metrics: ClassVar[bool] = False

    def __init__(
        self,
        tasks: Sequence[Task],
        moe: Mixture,
        expert_units: int,
        head_units: Sequence[int],
        **inputs: nn.Module,
    ):
        super().__init__()
        self.tasks = tuple(tasks)
        for name, module in inputs.items():
            self.add_module(name, module)
        self.moe = moe
        self.heads = nn.ModuleList(build_head(expert_units, head_units, task.outputs) for task in tasks)
        self.gate_names = _gate_names([task.name for task in tasks], moe)

    @abstractmethod
    def embed(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The input of the mixture (B, ...), and the keys (B,) int64 of hash gates, or None."""

    @abstractmethod
    def example_features(self, rows: int) -> dict[str, Tensor]:
        """Random features, to trace the model and to compare exported copies with it."""

    def forward(self, features: dict[str, Tensor]) -> tuple[list[Tensor], list[Routing]]:
        """The arrays of a batch by name -> one (B, outputs) per task, one routing per gate."""
        return self.mix(*self.embed(features))

    def mix(self, embedded: Tensor, keys: Tensor | None) -> tuple[list[Tensor], list[Routing]]:
        """As :meth:`forward`, from the results of :meth:`embed`."""
        mixed, routings = self.moe(embedded, keys=keys)
        return [head(y) for head, y in zip(self.heads, mixed, strict=True)], routings

    def weigh(self, losses: Sequence[Tensor]) -> Tensor:
        """The loss to minimise, Σ_t w_t L_t, from the mean loss of each task."""
        weighted: Tensor = sum(task.weight * loss for task, loss in zip(self.tasks, losses, strict=True))  # type: ignore[assignment]
        return weighted

    def trained_task_values(self) -> dict[str, dict[str, float]]:
        """Numbers that the model has learned about its tasks, by task; they are listed with the metrics."""
        return {}

    def flops(self, routings: Sequence[Routing]) -> int:
        """Floating-point operations of the matrix products and convolutions that made ``routings``' batch."""
        rows = routings[0].batch_shape[0]
        return self.moe.flops(routings) + rows * (self.embedding_flops() + count_linear_flops(self.heads))

    def embedding_flops(self) -> int:
        """Floating-point operations of :meth:`embed` per row."""
        return 0


def _gate_names(tasks: list[str], moe: Mixture) -> tuple[str, ...]:
    """The gates of tasks by their names; those of the earlier layers of PLE also by the layer."""
    if not isinstance(moe, PLE):
        return tuple(tasks)
    earlier = range(1, len(moe.layers))
    return (*(f"{name} (layer {layer})" for layer in earlier for name in (*tasks, "shared")), *tasks)


def build_head(in_features: int, units: Sequence[int], out_features: int) -> nn.Sequential:
    """ReLU layers of the given widths, then a linear one: (B, in_features) -> (B, out_features).

    Initialised as in Keras, which the paper used.
    """
    layers: list[nn.Module] = []
    for width in units:
        layers += [_build_linear(in_features, width), nn.ReLU()]
        in_features = width
    return nn.Sequential(*layers, _build_linear(in_features, out_features))


def build_embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding table, Uniform(±0.05) as in Keras."""
    table = nn.Embedding(rows, width)
    nn.init.uniform_(table.weight, -0.05, 0.05)
    return table


def make_generator(seed: int) -> torch.Generator:
    """A generator of its own, so that example features leave torch's as it is."""
    return torch.Generator().manual_seed(seed)


def _build_linear(in_features: int, out_features: int) -> nn.Linear:
    layer = nn.Linear(in_features, out_features)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
