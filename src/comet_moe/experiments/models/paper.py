"""The paper's networks of section S1.2: one for ratings, one for images."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from comet_moe.experiments.models.base import Model, build_embedding, make_generator
from comet_moe.experiments.models.tasks import Task
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
