"""A convolution with ReLU and 2x2 max pooling, whose maps are never stored as a whole.

Shapes: B images, C channels, F filters, maps (H, W), pooled maps (h, w) = (H // 2, W // 2).

    y = max_pool(relu(conv(x)))

The convolutions are torch's. They run on a few images at a time, and a compiled loop pools the maps while
they are in the cache. It stores where each maximum was, in one byte per value of y, and nothing else of the
maps. Pooling takes half as long as by torch's operators, and the memory of a step falls by the maps.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from comet_moe import checks
from comet_moe.kernels.autograd import differentiable_backward
from comet_moe.kernels.jit import can_run_compiled, jit
from comet_moe.kernels.threads import count_threads, over_rows

MAPS_IN_CACHE = 2**19
"""Values of the maps that are computed and pooled at a time."""

VALUE_COST = 2
"""Multiply-adds that take as long as pooling one value of the maps."""

NOWHERE = np.uint8(4)
"""Instead of the position of a maximum: it is not positive, so that ReLU makes it 0."""


def pooled_convolution(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """(B, C, ·, ·), (F, C, s, s), (F,) -> (B, F, h, w)."""
    maps = x.shape[0] * kernel.shape[0] * _map_size(x, kernel)
    is_plain = not checks.is_autocast(x) and x.dtype == kernel.dtype
    if is_plain and can_run_compiled(VALUE_COST * maps, x, kernel, bias):
        return _PooledConvolution.apply(channels_last(x), channels_last(kernel), bias)
    return pooled_convolution_torch(channels_last(x), channels_last(kernel), bias)


def pooled_convolution_torch(x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """The definition, by torch's operators; ReLU runs after the pooling, on a quarter of the values."""
    return F.relu(F.max_pool2d(F.conv2d(x, kernel, bias), 2))


def channels_last(x: Tensor) -> Tensor:
    """``x`` (·, C, H, W) in the memory format that CPU convolutions prefer; vmap has no memory formats.

    The memory of one channel is the same in both formats. Its strides say which one is meant: with those of
    channels last, torch's convolution of the paper's images takes a third of the time. Graphs have no
    strides in ONNX.
    """
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and checks.in_functorch_transform():
        return x
    x = x.contiguous(memory_format=torch.channels_last)
    _, channels, height, width = x.shape
    has_strides = channels == 1 and not is_compiling
    return x.as_strided(x.shape, (height * width, 1, width, 1)) if has_strides else x


class _PooledConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
        height, width = (side // 2 for side in _map_sides(x, kernel))
        out = x.new_empty(len(x), height, width, len(kernel))
        position = torch.empty_like(out, dtype=torch.uint8)
        for images in _shares(x, kernel):
            maps = torch.conv2d(x[images], kernel, bias).permute(0, 2, 3, 1).contiguous()
            parts = count_threads(len(maps), VALUE_COST * maps.numel())
            over_rows(_pool, parts, len(maps), maps, out[images], position[images])
        ctx.save_for_backward(x, kernel, bias, position)
        return out.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel, bias, position = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return differentiable_backward(pooled_convolution_torch, (x, kernel, bias), [grad], needs)
        pooled = grad.permute(0, 2, 3, 1).contiguous()
        grad_x = torch.empty_like(x) if needs[0] else None
        grad_kernel, grad_bias = torch.zeros_like(kernel), torch.zeros_like(bias)
        for images in _shares(x, kernel):
            count = len(pooled[images])
            maps = pooled.new_zeros(count, *_map_sides(x, kernel), len(kernel))  # odd sides: their last is 0
            parts = count_threads(count, VALUE_COST * maps.numel())
            over_rows(_unpool, parts, count, pooled[images], position[images], maps)
            for_x, for_kernel, for_bias = torch.ops.aten.convolution_backward(
                maps.permute(0, 3, 1, 2),
                x[images],
                kernel,
                [len(bias)],
                stride=[1, 1],
                padding=[0, 0],
                dilation=[1, 1],
                transposed=False,
                output_padding=[0, 0],
                groups=1,
                output_mask=needs,
            )
            if grad_x is not None:
                grad_x[images] = for_x
            if needs[1]:
                grad_kernel += for_kernel
            if needs[2]:
                grad_bias += for_bias
        return grad_x, grad_kernel if needs[1] else None, grad_bias if needs[2] else None


def _map_sides(x: Tensor, kernel: Tensor) -> tuple[int, int]:
    return x.shape[2] - kernel.shape[2] + 1, x.shape[3] - kernel.shape[3] + 1


def _map_size(x: Tensor, kernel: Tensor) -> int:
    height, width = _map_sides(x, kernel)
    return height * width


def _shares(x: Tensor, kernel: Tensor) -> Iterator[slice]:
    """Slices of as many images as have ``MAPS_IN_CACHE`` values in their maps."""
    images = max(1, MAPS_IN_CACHE // (len(kernel) * _map_size(x, kernel)))
    for first in range(0, len(x), images):
        yield slice(first, first + images)


@jit
def _pool(part: int, first: int, last: int, maps: Any, out: Any, position: Any) -> None:
    """The maximum of each square, and its position in it; as in torch, the first one, and NaN before all."""
    _, height, width, filters = out.shape
    for i in range(first, last):
        for y in range(height):
            for x in range(width):
                a, b = maps[i, 2 * y, 2 * x], maps[i, 2 * y, 2 * x + 1]
                c, d = maps[i, 2 * y + 1, 2 * x], maps[i, 2 * y + 1, 2 * x + 1]
                for f in range(filters):
                    largest, where = a[f], np.uint8(0)
                    if b[f] > largest or b[f] != b[f]:
                        largest, where = b[f], np.uint8(1)
                    if c[f] > largest or c[f] != c[f]:
                        largest, where = c[f], np.uint8(2)
                    if d[f] > largest or d[f] != d[f]:
                        largest, where = d[f], np.uint8(3)
                    if largest <= 0:
                        largest, where = maps.dtype.type(0), NOWHERE
                    out[i, y, x, f], position[i, y, x, f] = largest, where


@jit
def _unpool(part: int, first: int, last: int, grad: Any, position: Any, maps: Any) -> None:
    """The gradient of the maps: that of each maximum at its position, 0 elsewhere."""
    _, height, width, filters = grad.shape
    zero = grad.dtype.type(0)
    for i in range(first, last):
        for y in range(height):
            for x in range(width):
                a, b = maps[i, 2 * y, 2 * x], maps[i, 2 * y, 2 * x + 1]
                c, d = maps[i, 2 * y + 1, 2 * x], maps[i, 2 * y + 1, 2 * x + 1]
                for f in range(filters):
                    value, where = grad[i, y, x, f], position[i, y, x, f]
                    a[f] = value if where == 0 else zero
                    b[f] = value if where == 1 else zero
                    c[f] = value if where == 2 else zero
                    d[f] = value if where == 3 else zero
