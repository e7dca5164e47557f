"""Any modules as experts."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe.experts.base import Experts


class ModuleExperts(Experts):
    """A list of modules of one signature, (m, *input) -> (m, *output).

    Args:
        modules: the experts.
        input_rank: dimensions of one sample: 1 for features, 3 for images (C, H, W).
    """

    def __init__(self, modules: Iterable[nn.Module], input_rank: int = 1):
        super().__init__()
        self.members = modules if isinstance(modules, nn.ModuleList) else nn.ModuleList(modules)
        if not len(self.members):
            raise ValueError("experts must be a list of at least 1 module, got an empty one")
        self.num_experts = len(self.members)
        self.input_rank = input_rank

    def flops(self) -> int:
        """Not known for any module: count it with ``torch.utils.flop_counter``."""
        raise ValueError(
            "the operations of free-form experts are not known; count them with torch.utils.flop_counter"
        )

    def dense(self, x: Tensor) -> Tensor:
        """(B, *input) -> (B, n, *output)."""
        return torch.stack([module(x) for module in self.members], 1)

    def one(self, rows: Tensor, expert: int) -> Tensor:
        """(m, *input) -> (m, *output)."""
        output: Tensor = self.members[expert](rows)
        return output

    def sparse(self, rows: Tensor, counts: list[int]) -> Tensor:
        """(M, *input) -> (M, *output)."""
        outputs: list[Tensor] = []
        unused: list[nn.Parameter] = []
        for module, group in zip(self.members, rows.split(counts), strict=True):
            if len(group) or (not len(rows) and not outputs):  # of an empty batch, one knows the shape
                outputs.append(module(group))
            else:
                unused += [p for p in module.parameters() if p.requires_grad]
        return _ZeroGradient.apply(torch.cat(outputs), *unused)


class _ZeroGradient(torch.autograd.Function):
    """The identity, with a gradient of zero for parameters that were not used."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *unused: Tensor) -> Tensor:
        ctx.unused = unused
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad, *(torch.zeros_like(parameter) for parameter in ctx.unused))
