"""The vision network of section S1.2: CNN experts, one gate and one head per task."""

from collections.abc import Sequence

from torch import Tensor, nn

from comet_moe.experiments.models.layers import build_head
from comet_moe.experiments.models.tasks import Task
from comet_moe.experts import ConvExperts
from comet_moe.experts.base import count_linear_flops
from comet_moe.gates import Gate
from comet_moe.mixture.moe import MultiGateMoE
from comet_moe.routing import Routing


class ImageModel(nn.Module):
    """A mixture of CNNs with one gate per task on the flattened image.

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
        self.heads = nn.ModuleList(
            build_head(experts.out_features, head_units, task.outputs) for task in tasks
        )

    def forward(self, features: dict[str, Tensor]) -> tuple[list[Tensor], list[Routing]]:
        """``image`` (B, C, H, W) uint8 -> one (B, outputs) and one routing per task."""
        image = features["image"].to(next(self.parameters()).dtype) / 255
        mixed, routings = self.moe(image)
        return [head(y) for head, y in zip(self.heads, mixed, strict=True)], routings

    def flops(self, routings: Sequence[Routing]) -> int:
        """Floating-point operations of the matrix products and convolutions that made ``routings``' batch."""
        rows = routings[0].batch_shape[0]
        return self.moe.flops(routings) + rows * count_linear_flops(self.heads)
