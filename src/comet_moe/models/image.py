"""The vision network of section S1.2: CNN experts, a gate and a head a task."""

from collections.abc import Sequence

from torch import Tensor, nn

from comet_moe.experts import ConvExperts
from comet_moe.gates import Gate
from comet_moe.models.layers import head, linear_flops
from comet_moe.models.tasks import Task
from comet_moe.moe import MultiGateMoE
from comet_moe.routing import Routing


class ImageModel(nn.Module):
    """A mixture of CNNs with one gate a task on the flattened image.

    Args:
        tasks: what is predicted.
        experts: the CNNs.
        gates: one a task, over C·H·W features.
        head_units: widths of each head's ReLU layers.
    """

    def __init__(
        self,
        *,
        tasks: Sequence[Task],
        experts: ConvExperts,
        gates: Sequence[Gate],
        head_units: Sequence[int] = (),
    ):
        super().__init__()
        self.tasks = tuple(tasks)
        self.moe = MultiGateMoE(experts=experts, gates=gates)
        self.heads = nn.ModuleList(head(experts.out_features, head_units, task.outputs) for task in tasks)

    def forward(self, features: dict[str, Tensor]) -> tuple[list[Tensor], list[Routing]]:
        """``image`` (B, C, H, W) uint8 -> one (B, outputs) and one routing a task."""
        image = features["image"].to(next(self.parameters()).dtype) / 255
        mixed, routings = self.moe(image)
        return [head(y) for head, y in zip(self.heads, mixed, strict=True)], routings

    def flops(self, routings: Sequence[Routing]) -> int:
        """Floating-point operations of the matrix products and convolutions that made ``routings``' batch."""
        rows = routings[0].batch_shape[0]
        return self.moe.flops(routings) + rows * linear_flops(self.heads)
