"""Experts of convolutions with pooling and dense layers, as in the paper's vision models."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comet_moe import checks
from comet_moe.experts.base import Experts
from comet_moe.experts.grouped_linear import GroupedLinear, sorted_linear
from comet_moe.kernels.pooled_convolution import channels_last, pooled_convolution


class ConvExperts(Experts):
    """n CNNs: for each filter count a convolution, ReLU and 2x2 max pooling; then ReLU dense layers.

    Convolutions are unpadded. Without dense layers the flattened maps are the output.

    Args:
        num_experts: n.
        input_shape: (C, H, W).
        filters: number of filters of each convolution; at least one convolution.
        kernel_size: height and width of every kernel, in pixels.
        units: width of each dense layer after the flattening.

    Example:
        >>> import torch
        >>> from comet_moe.experts import ConvExperts
        >>> experts = ConvExperts(num_experts=4, input_shape=(1, 28, 28), filters=(8, 16), kernel_size=3)
        >>> experts.dense(torch.randn(5, 1, 28, 28)).shape
        torch.Size([5, 4, 400])
    """

    input_rank = 3
    takes_offsets = True

    def __init__(
        self,
        num_experts: int,
        input_shape: tuple[int, int, int],
        filters: Sequence[int],
        kernel_size: int,
        units: Sequence[int] = (),
    ):
        super().__init__()
        self.num_experts = checks.at_least_one("num_experts", num_experts)
        if not isinstance(input_shape, Sequence) or len(input_shape) != 3:
            raise ValueError(f"input_shape must be (channels, height, width), got {input_shape!r}")
        if not filters:
            raise ValueError("filters must be the filter counts of at least 1 convolution, got none")
        for name, values in (("input_shape", input_shape), ("filters", filters), ("units", units)):
            for value in values:
                checks.at_least_one(f"every number in {name}", value)
        checks.at_least_one("kernel_size", kernel_size)
        self.input_shape = tuple(input_shape)
        channels, *size = input_shape
        self.kernels = nn.ParameterList()
        self.biases = nn.ParameterList()
        for count in filters:
            kernel = torch.empty(num_experts, count, channels, kernel_size, kernel_size)
            for expert in kernel:
                nn.init.xavier_uniform_(expert)
            self.kernels.append(nn.Parameter(kernel))
            self.biases.append(nn.Parameter(torch.zeros(num_experts, count)))
            channels, size = count, [(side - kernel_size + 1) // 2 for side in size]
            if min(size) < 1:
                raise ValueError(
                    f"images of {input_shape[1]}x{input_shape[2]} are too small for {len(filters)} "
                    f"convolutions of size {kernel_size} with pooling"
                )
        widths = [channels * size[0] * size[1], *units]
        self.layers = nn.ModuleList(
            GroupedLinear(num_experts, before, after) for before, after in pairwise(widths)
        )
        self.out_features = widths[-1]

    def flops(self) -> int:
        """Floating-point operations of the convolutions and the dense layers of one expert on one row."""
        total, (height, width) = 0, self.input_shape[1:]
        for kernel in self.kernels:
            size = kernel.shape[-1]
            height, width = height - size + 1, width - size + 1
            total += 2 * kernel.shape[1:].numel() * height * width
            height, width = height // 2, width // 2
        return total + sum(layer.flops() for layer in self._layers())

    def dense(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, n, u): one convolution per expert was faster on a CPU than a grouped one."""
        x = channels_last(x)
        maps = [_convolve(x, self._convolutions(expert)) for expert in range(self.num_experts)]
        hidden = torch.stack(maps, dim=1)
        for layer in self._layers():
            hidden = F.relu(layer.each(hidden))
        return hidden

    def one(self, rows: Tensor, expert: int) -> Tensor:
        """(m, C, H, W) -> (m, u)."""
        hidden = _convolve(rows, self._convolutions(expert))
        for layer in self._layers():
            hidden = F.relu(layer.one(hidden, expert))
        return hidden

    def sparse(self, rows: Tensor, counts: list[int]) -> Tensor:
        """(M, C, H, W) -> (M, u)."""
        maps = [
            _convolve(group, self._convolutions(expert))
            for expert, group in enumerate(rows.split(counts))
            if len(group) or not len(rows)
        ]
        hidden = torch.cat(maps)
        for layer in self._layers():
            hidden = F.relu(layer.grouped(hidden, counts))
        return hidden

    def sorted_rows(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """(M, C, H, W) -> (M, u): convolutions as products of the patches of all images."""
        for kernel, bias in zip(self.kernels, self.biases, strict=True):
            size = kernel.shape[-1]
            height, width = rows.shape[-2] - size + 1, rows.shape[-1] - size + 1
            patches = F.unfold(rows, size).transpose(1, 2).flatten(0, 1)  # (M · height · width, C · size²)
            maps = sorted_linear(patches, kernel.flatten(2), bias, offsets * (height * width))
            maps = maps.unflatten(0, (rows.shape[0], height * width)).transpose(1, 2)
            rows = F.relu(F.max_pool2d(maps.unflatten(2, (height, width)), 2))
        hidden = rows.flatten(1)
        for layer in self._layers():
            hidden = F.relu(layer.sorted_rows(hidden, offsets))
        return hidden

    def _layers(self) -> list[GroupedLinear]:
        return [layer for layer in self.layers if isinstance(layer, GroupedLinear)]

    def _convolutions(self, expert: int) -> list[tuple[Tensor, Tensor]]:
        """Kernel and bias of each convolution of one expert."""
        layers = zip(self.kernels, self.biases, strict=True)
        return [(kernel[expert], bias[expert]) for kernel, bias in layers]


def _convolve(rows: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Flattened maps of one expert: (m, C, H, W) -> (m, F)."""
    for kernel, bias in layers:
        rows = pooled_convolution(rows, kernel, bias)
    return rows.flatten(1)
