"""The networks: those of section S1.2 of the paper, for ratings and images, and one for any table."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from comet_moe.experiments.models.base import Mixture, Model, Task, build_embedding, make_generator
from comet_moe.experiments.models.table_inputs import TableInput
from comet_moe.experts import ConvExperts, DenseExperts
from comet_moe.gates import Gate
from comet_moe.mixture.moe import MultiGateMoE


class RatingModel(Model):
    """A mixture over the concatenated embeddings of user and item, with one gate per task.

    Features are ``user`` and ``item``, (B,) integers each. Hash gates route by user.

    Args:
        tasks: the targets to predict.
        num_users: rows of the user table.
        num_items: rows of the item table.
        embedding_width: features of an embedding, of a user or an item.
        experts: the experts, whose input has 2 · embedding_width features.
        gates: one per task.
        head_units: widths of each head's ReLU layers.

    Example:
        >>> import torch
        >>> from comet_moe.experts import DenseExperts
        >>> from comet_moe.gates import CometGate
        >>> from comet_moe.experiments.models import RatingModel, rating_tasks
        >>> tasks = rating_tasks(alpha=0.5)
        >>> model = RatingModel(
        ...     tasks=tasks,
        ...     num_users=100,
        ...     num_items=50,
        ...     embedding_width=8,
        ...     experts=DenseExperts(num_experts=4, in_features=16, out_features=16),
        ...     gates=[CometGate(in_features=16, num_experts=4, k=2) for _ in tasks],
        ...     head_units=(8,),
        ... )
        >>> outputs, _ = model({"user": torch.tensor([3, 7]), "item": torch.tensor([0, 49])})
        >>> [output.shape for output in outputs]
        [torch.Size([2, 1]), torch.Size([2, 1])]
    """

    kind = "rating"
    moe: MultiGateMoE
    users: nn.Embedding
    items: nn.Embedding

    def __init__(
        self,
        *,
        tasks: Sequence[Task],
        num_users: int,
        num_items: int,
        embedding_width: int,
        experts: DenseExperts,
        gates: Sequence[Gate],
        head_units: Sequence[int],
    ):
        super().__init__(
            tasks,
            MultiGateMoE(experts=experts, gates=gates),
            experts.out_features,
            head_units,
            users=build_embedding(num_users, embedding_width),
            items=build_embedding(num_items, embedding_width),
        )

    def embed(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The embeddings (B, 2 · width) of user and item, and the users as keys."""
        user, item = features["user"].long(), features["item"].long()
        return torch.cat((self.users(user), self.items(item)), -1), user

    def example_features(self, rows: int) -> dict[str, Tensor]:
        """Random users and items."""
        generator = make_generator(rows)
        sizes = {"user": self.users.num_embeddings, "item": self.items.num_embeddings}
        return {name: torch.randint(size, (rows,), generator=generator) for name, size in sizes.items()}


class ImageModel(Model):
    """A mixture of CNNs with one gate per task on the flattened image.

    The feature is ``image``, (B, C, H, W) uint8.

    Args:
        tasks: the targets to predict.
        experts: the CNNs.
        gates: one per task, over C·H·W features.
        head_units: widths of each head's ReLU layers.

    Example:
        >>> import torch
        >>> from comet_moe.experts import ConvExperts
        >>> from comet_moe.gates import TopKGate
        >>> from comet_moe.experiments.models import ImageModel, image_tasks
        >>> tasks = image_tasks({"digit": 10, "is_even": 2})
        >>> experts = ConvExperts(num_experts=4, input_shape=(1, 12, 12), filters=(3,), kernel_size=3)
        >>> model = ImageModel(tasks=tasks, experts=experts, gates=[TopKGate(144, 4, k=2) for _ in tasks])
        >>> outputs, _ = model({"image": torch.zeros(5, 1, 12, 12, dtype=torch.uint8)})
        >>> [output.shape for output in outputs]
        [torch.Size([5, 10]), torch.Size([5, 1])]
    """

    kind = "image"
    moe: MultiGateMoE

    def __init__(
        self,
        *,
        tasks: Sequence[Task],
        experts: ConvExperts,
        gates: Sequence[Gate],
        head_units: Sequence[int] = (),
    ):
        super().__init__(tasks, MultiGateMoE(experts=experts, gates=gates), experts.out_features, head_units)
        self.image_shape = experts.input_shape

    def embed(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The image with values in 0..1; there are no keys."""
        return features["image"].to(next(self.parameters()).dtype) / 255, None

    def example_features(self, rows: int) -> dict[str, Tensor]:
        """Random images."""
        shape, generator = (rows, *self.image_shape), make_generator(rows)
        return {"image": torch.randint(256, shape, generator=generator, dtype=torch.uint8)}


class TableModel(Model):
    """A mixture over the concatenated embeddings of a table's columns, with one gate and one tower per task.

    The mixture is MMoE (:class:`~comet_moe.MultiGateMoE`), CGC or PLE (:mod:`comet_moe.mixture.ple`).

    Args:
        tasks: the targets to predict.
        inputs: modules that embed the arrays of a table, by the name of the array: ``categorical``,
            ``numeric`` and ``lists``, each (B, columns) -> (B, out_features).
        moe: the mixture, whose input has as many features as all ``inputs`` together.
        expert_units: outputs of an expert.
        head_units: widths of each tower's ReLU layers.
        dropout: probability of a zero in training, in the input of the mixture.
        key: index of the categorical column that hash gates route by.
        uncertainty: whether to learn the weights of the tasks, see :meth:`weigh`.

    Example:
        >>> import torch
        >>> from comet_moe import MultiGateMoE
        >>> from comet_moe.experts import MLPExperts
        >>> from comet_moe.gates import CometGate
        >>> from comet_moe.experiments.models import Task, TableModel
        >>> from comet_moe.experiments.models.table_inputs import CategoricalEmbeddings
        >>> from comet_moe.experiments.models.table_inputs import PiecewiseLinearEmbeddings
        >>> inputs = {
        ...     "categorical": CategoricalEmbeddings(sizes=[5, 9], width=4),
        ...     "numeric": PiecewiseLinearEmbeddings(edges=[[0.0, 1.0, 10.0]], width=8),
        ... }
        >>> tasks = [Task("clicked", "binary", 0.5), Task("minutes", "regression", 0.5)]
        >>> moe = MultiGateMoE(
        ...     experts=MLPExperts(num_experts=4, in_features=16, units=(32,)),
        ...     gates=[CometGate(16, 4, k=2) for _ in tasks],
        ... )
        >>> model = TableModel(tasks=tasks, inputs=inputs, moe=moe, expert_units=32)
        >>> outputs, _ = model({"categorical": torch.tensor([[0, 8]]), "numeric": torch.tensor([[2.5]])})
        >>> [output.shape for output in outputs]
        [torch.Size([1, 1]), torch.Size([1, 1])]
    """

    kind = "table"
    has_table_metrics = True
    inputs: nn.ModuleDict
    dropout: nn.Dropout

    def __init__(
        self,
        *,
        tasks: Sequence[Task],
        inputs: Mapping[str, TableInput],
        moe: Mixture,
        expert_units: int,
        head_units: Sequence[int] = (),
        dropout: float = 0.0,
        key: int | None = None,
        uncertainty: bool = False,
    ):
        super().__init__(
            tasks,
            moe,
            expert_units,
            head_units,
            inputs=nn.ModuleDict(dict(inputs)),
            dropout=nn.Dropout(dropout),
        )
        self.key = key
        self.log_variances = nn.Parameter(torch.zeros(len(self.tasks))) if uncertainty else None

    def embed(self, features: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The embeddings of all columns side by side, and the codes of the key column."""
        embedded = [module(features[name]) for name, module in self.inputs.items()]
        keys = None if self.key is None else features["categorical"][:, self.key].long()
        return self.dropout(torch.cat(embedded, -1)), keys

    def example_features(self, rows: int) -> dict[str, Tensor]:
        """Random arrays of the table."""
        generator = make_generator(rows)
        modules = {name: cast(TableInput, module) for name, module in self.inputs.items()}
        return {name: module.example(rows, generator) for name, module in modules.items()}

    def weigh(self, losses: Sequence[Tensor]) -> Tensor:
        """The loss to minimise, from the mean loss of each task; of each row, from those of the rows.

        It is Σ_t w_t L_t with fixed weights, or Σ_t w_t (e^{-s_t} L_t + s_t / 2) by uncertainty (Kendall et
        al. 2018). There s_t = log σ_t² is learned, and the squared error of a regression counts half.
        """
        if self.log_variances is None:
            return super().weigh(losses)
        terms = [
            task.weight * ((-s).exp() * loss * (0.5 if task.kind == "regression" else 1.0) + s / 2)
            for task, s, loss in zip(self.tasks, self.log_variances, losses, strict=True)
        ]
        return torch.stack(terms).sum(0)

    def trained_task_values(self) -> dict[str, dict[str, float]]:
        """The ``log_variance`` s_t of each task, if tasks are weighed by uncertainty."""
        if self.log_variances is None:
            return {}
        names = [task.name for task in self.tasks]
        values = self.log_variances.tolist()
        return {name: {"log_variance": value} for name, value in zip(names, values, strict=True)}

    def embedding_flops(self) -> int:
        """Operations of the linear maps of numbers, per row."""
        return sum(cast(TableInput, module).flops() for module in self.inputs.values())
