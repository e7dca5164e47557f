"""The recommender network of section S1.2: two embeddings, dense experts, one gate and one head per task."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from comet_moe.experiments.models.layers import build_embedding, build_head
from comet_moe.experiments.models.tasks import Task
from comet_moe.experts import DenseExperts
from comet_moe.experts.base import count_linear_flops
from comet_moe.gates import Gate
from comet_moe.mixture.moe import MultiGateMoE
from comet_moe.routing import Routing


class RatingModel(nn.Module):
    """A mixture over the concatenated embeddings of user and item, with one gate per task.

    Args:
        tasks: the targets to predict.
        num_users: rows of the user table.
        num_items: rows of the item table.
        embedding_width: features of an embedding, of a user or an item.
        experts: the experts, whose input has 2 · embedding_width features.
        gates: one per task; hash gates route by user.
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
        super().__init__()
        self.tasks = tuple(tasks)
        self.users = build_embedding(num_users, embedding_width)
        self.items = build_embedding(num_items, embedding_width)
        self.moe = MultiGateMoE(experts=experts, gates=gates)
        self.heads = nn.ModuleList(
            build_head(experts.out_features, head_units, task.outputs) for task in tasks
        )

    def forward(self, features: dict[str, Tensor]) -> tuple[list[Tensor], list[Routing]]:
        """``user`` and ``item`` (B,) integers -> one (B, outputs) and one routing per task."""
        user = features["user"].long()
        return self.from_embeddings(self.users(user), self.items(features["item"].long()), user)

    def from_embeddings(self, user: Tensor, item: Tensor, keys: Tensor) -> tuple[list[Tensor], list[Routing]]:
        """As :meth:`forward`, from embeddings (B, width) each, which need not be rows of the tables.

        ``keys`` (B,) int64 are the indices of the users, for hash gates.
        """
        mixed, routings = self.moe(torch.cat((user, item), -1), keys=keys)
        return [head(y) for head, y in zip(self.heads, mixed, strict=True)], routings

    def flops(self, routings: Sequence[Routing]) -> int:
        """Floating-point operations of the matrix products and convolutions that made ``routings``' batch."""
        rows = routings[0].batch_shape[0]
        return self.moe.flops(routings) + rows * count_linear_flops(self.heads)
