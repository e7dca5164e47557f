"""Any modules as experts."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe import checks
from comet_moe.experts.base import Experts, check_output


class ModuleExperts(Experts):
    """A list of modules with one signature, ``(m, *input) -> (m, *output)``.

    Args:
        modules: the experts.
        input_rank: dimensions of one sample: 1 for features, 3 for images (C, H, W).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from comet_moe import MoE
        >>> from comet_moe.experts import ModuleExperts
        >>> from comet_moe.gates import TopKGate
        >>> cnns = [nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()) for _ in range(4)]
        >>> moe = MoE(experts=ModuleExperts(cnns, input_rank=3), gate=TopKGate(36, 4, k=2))
        >>> y, _ = moe(torch.randn(5, 1, 6, 6))
        >>> y.shape
        torch.Size([5, 32])
    """

    def __init__(self, modules: Iterable[nn.Module], input_rank: int = 1):
        super().__init__()
        if not isinstance(modules, Iterable) or isinstance(modules, str):
            raise ValueError(f"experts must be a list of modules, got {modules!r}")
        self.members = modules if isinstance(modules, nn.ModuleList) else nn.ModuleList(modules)
        if not len(self.members):
            raise ValueError("experts must be a list of at least 1 module, got an empty one")
        self.num_experts = len(self.members)
        self.input_rank = checks.at_least_one("input_rank", input_rank)

    def flops(self) -> int:
        """Raise an error: the operations of arbitrary modules are unknown."""
        raise ValueError(
            "the operations of an nn.ModuleList of experts are not known; count them with "
            "torch.utils.flop_counter"
        )

    def dense(self, x: Tensor) -> Tensor:
        """``(B, *input) -> (B, n, *output)``."""
        outputs = [self.one(x, expert) for expert in range(self.num_experts)]
        _check_same_shape(outputs, range(self.num_experts))
        return torch.stack(outputs, 1)

    def one(self, rows: Tensor, expert: int) -> Tensor:
        """``(m, *input) -> (m, *output)``."""
        module = self.members[expert]
        output: Tensor = module(rows)
        check_output(output, (rows.shape[0],), f"expert {expert} ({type(module).__name__})", rows)
        return output

    def sparse(self, rows: Tensor, counts: list[int]) -> Tensor:
        """``(M, *input) -> (M, *output)``."""
        outputs: list[Tensor] = []
        used: list[int] = []
        unused: list[nn.Parameter] = []
        for expert, group in enumerate(rows.split(counts)):
            if len(group) or (not len(rows) and not outputs):  # an empty batch runs one expert, for the shape
                outputs.append(self.one(group, expert))
                used.append(expert)
            else:
                unused += [p for p in self.members[expert].parameters() if p.requires_grad]
        _check_same_shape(outputs, used)
        if (
            checks.in_functorch_transform()
        ):  # where parameters that were not used get a gradient of zero anyway
            return torch.cat(outputs)
        return _ZeroGradient.apply(torch.cat(outputs), *unused)


def _check_same_shape(outputs: Sequence[Tensor], experts: Sequence[int]) -> None:
    """All outputs must have the shape of the first, except for the number of rows."""
    shape = outputs[0].shape[1:]
    for expert, output in zip(experts, outputs, strict=True):
        if output.shape[1:] != shape:
            raise ValueError(
                f"all experts must return the same shape per row: expert {experts[0]} returned "
                f"{tuple(shape)}, expert {expert} {tuple(output.shape[1:])}"
            )


class _ZeroGradient(torch.autograd.Function):
    """The identity, with a gradient of zero (not None) for parameters that were not used."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *unused: Tensor) -> Tensor:
        ctx.unused = unused  # only their shapes matter, so they may change before the backward pass
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad, *(torch.zeros_like(parameter) for parameter in ctx.unused))
