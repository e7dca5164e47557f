"""The recommender network of section S1.2: two embeddings, dense experts, a gate and a head a task."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from comet_moe.experts import DenseExperts
from comet_moe.gates import Gate
from comet_moe.models.layers import embedding, head, linear_flops
from comet_moe.models.tasks import Task
from comet_moe.moe import MultiGateMoE
from comet_moe.routing import Routing


class RatingModel(nn.Module):
    """A mixture over the concatenated embeddings of user and item, with one gate a task.

    Args:
        tasks: what is predicted.
        num_users: rows of the user table.
        num_items: rows of the item table.
        embedding_width: of each table.
        experts: over 2 · embedding_width features.
        gates: one a task; hash gates route by user.
        head_units: widths of each head's ReLU layers.
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
        self.users = embedding(num_users, embedding_width)
        self.items = embedding(num_items, embedding_width)
        self.moe = MultiGateMoE(experts=experts, gates=gates)
        self.heads = nn.ModuleList(head(experts.out_features, head_units, task.outputs) for task in tasks)

    def forward(self, features: dict[str, Tensor]) -> tuple[list[Tensor], list[Routing]]:
        """``user`` and ``item`` (B,) integers -> one (B, outputs) and one routing a task."""
        user = features["user"].long()
        return self.from_embeddings(self.users(user), self.items(features["item"].long()), user)

    def from_embeddings(self, user: Tensor, item: Tensor, keys: Tensor) -> tuple[list[Tensor], list[Routing]]:
        """The same from embeddings (B, width) each, which need not be rows of the tables.

        ``keys`` (B,) int64 are the users' numbers, for hash gates.
        """
        mixed, routings = self.moe(torch.cat((user, item), -1), keys=keys)
        return [head(y) for head, y in zip(self.heads, mixed, strict=True)], routings

    def flops(self, routings: Sequence[Routing]) -> int:
        """Floating-point operations of the matrix products and convolutions that made ``routings``' batch."""
        rows = routings[0].batch_shape[0]
        return self.moe.flops(routings) + rows * linear_flops(self.heads)
