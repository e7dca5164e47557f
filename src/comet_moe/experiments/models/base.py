"""What every network of a recipe offers, and the layers that they share.

Training, evaluation, prediction and export use a network through :class:`Model` alone. A network says how
features become one vector per row (:meth:`Model.embed`); mixture, gates and heads are the same for all.

Shapes: B rows, p features that the mixture reads.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from comet_moe.experiments.models.tasks import Task
from comet_moe.experts.base import count_linear_flops
from comet_moe.mixture.moe import MultiGateMoE
from comet_moe.mixture.ple import CGC, PLE
from comet_moe.routing import Routing

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
