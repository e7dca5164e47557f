"""Matrix products of rows that are sorted by expert, each expert with its own weights.

Shapes: M rows sorted by expert, n experts, p inputs, u outputs.

Where Python knows how many rows each expert has, :func:`grouped_mm` multiplies in compiled loops. Products of
a few dozen rows are too small to share among threads one by one. Here each thread has an equal share of all
rows, or of all rows of the weights' gradients, over all experts, and multiplies alone. It writes and sums
biases while their rows are in its cache. The products are those of MKL. Where torch
has another library (ARM, macOS), :func:`can_group` is False and callers use one ``torch.mm`` per expert, the
definition.

Where only the device knows the counts, :func:`sorted_mm` has them as a tensor. Offsets (n,) int32 are where
the rows of each expert end, and rows after the last one are of no expert. ``F.grouped_mm`` computes the
products; what it leaves unwritten is set to 0 here, so that it reaches no output and no gradient. As
operators of their own they can be in graphs in float32 too, where torch has ``grouped_mm`` in bfloat16 only.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from comet_moe.checks import has_dispatch_mode
from comet_moe.kernels._mkl import FUNCTIONS, multiply, why_no_product
from comet_moe.kernels.jit import can_run_compiled, jit
from comet_moe.kernels.threads import count_threads, over_rows


def can_group(work: int, *tensors: Tensor) -> bool:
    """Whether the compiled loops can take these tensors, and ``work`` multiply-adds are worth them.

    Not under a dispatch mode, such as a FLOP counter, which has to see the products.
    """
    dtype = tensors[0].dtype
    return (
        dtype in FUNCTIONS
        and can_run_compiled(work, *tensors)
        and all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)
        and not has_dispatch_mode()
        and not why_no_product()
    )


def grouped_mm(rows: Tensor, weight: Tensor, bias: Tensor, stops: Tensor) -> Tensor:
    """W_e x + b_e for each row x of expert e: (M, p), (n, u, p), (n, u) -> (M, u).

    Args:
        rows: sorted by expert.
        weight, bias: those of all experts.
        stops: (n,) int64, where the rows of each expert end.
    """
    out = rows.new_empty(len(rows), weight.shape[1])
    parts = count_threads(len(rows), len(rows) * weight.shape[1:].numel())
    over_rows(_forward, parts, len(rows), stops, rows, weight, bias, out)
    return out


def grouped_mm_backward(
    grad: Tensor,
    rows: Tensor | None,
    weight: Tensor | None,
    stops: Tensor,
    needs_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of :func:`grouped_mm`; those of experts without rows are 0.

    Args:
        grad: (M, u), gradient of the outputs.
        rows: (M, p); None if the gradient of the weights is not needed.
        weight: (n, u, p); None if the gradient of the rows is not needed.
        stops: (n,) int64, where the rows of each expert end.
        needs_bias: whether the gradient of the biases is needed.
    """
    outputs, experts = grad.shape[1], len(stops)
    grad_rows = grad_weight = grad_bias = None
    if weight is not None:
        grad_rows = grad.new_empty(len(grad), weight.shape[2])
        parts = count_threads(len(grad), grad.numel() * weight.shape[2])
        over_rows(_backward_rows, parts, len(grad), stops, grad, weight, grad_rows)
    if rows is not None or needs_bias:
        factor = grad.new_empty(len(grad), 0) if rows is None else rows
        grad_weight = grad.new_empty(experts, outputs, factor.shape[1])
        grad_bias = grad.new_empty(experts if needs_bias else 0, outputs)
        # A unit of work is one row of the gradient of an expert's weights times one row of the expert.
        units = grad.numel()
        parts = count_threads(units, units * factor.shape[1])
        over_rows(_backward_weight, parts, units, stops, grad, factor, grad_weight, grad_bias)
    return (
        grad_rows,
        grad_weight if rows is not None else None,
        grad_bias if needs_bias else None,
    )


@jit
def _address(array: Any, position: int) -> int:
    """Where the number at ``position`` of a contiguous ``array`` is in memory."""
    return np.int64(array.ctypes.data) + position * array.itemsize


@jit
def _forward(
    part: int, first: int, last: int, stops: Any, rows: Any, weight: Any, bias: Any, out: Any
) -> None:
    _, outputs, inputs = weight.shape
    numbers, scales = np.empty(8, np.int64), np.empty(2, out.dtype)
    start = 0
    for expert in range(len(stops)):
        low, high = max(first, start), min(last, stops[expert])
        start = stops[expert]
        if low < high:
            for row in range(low, high):
                for c in range(outputs):
                    out[row, c] = bias[expert, c]
            addresses = (
                _address(weight, expert * outputs * inputs),
                _address(rows, low * inputs),
                _address(out, low * outputs),
            )
            sizes, strides = (outputs, high - low, inputs), (inputs, inputs, outputs)
            multiply(True, False, sizes, strides, addresses, 1.0, numbers, scales)


@jit
def _backward_rows(
    part: int, first: int, last: int, stops: Any, grad: Any, weight: Any, grad_rows: Any
) -> None:
    _, outputs, inputs = weight.shape
    numbers, scales = np.empty(8, np.int64), np.empty(2, grad.dtype)
    start = 0
    for expert in range(len(stops)):
        low, high = max(first, start), min(last, stops[expert])
        start = stops[expert]
        if low < high:
            addresses = (
                _address(weight, expert * outputs * inputs),
                _address(grad, low * outputs),
                _address(grad_rows, low * inputs),
            )
            sizes, strides = (inputs, high - low, outputs), (inputs, outputs, inputs)
            multiply(False, False, sizes, strides, addresses, 0.0, numbers, scales)


@jit
def _backward_weight(
    part: int,
    first: int,
    last: int,
    stops: Any,
    grad: Any,
    rows: Any,
    grad_weight: Any,
    grad_bias: Any,
) -> None:
    """Expert by expert, the rows of its gradient whose work lies in ``first`` to ``last``."""
    experts, outputs, inputs = grad_weight.shape
    has_bias = len(grad_bias) > 0
    numbers, scales = np.empty(8, np.int64), np.empty(2, grad.dtype)
    start = 0
    for expert in range(experts):
        count = stops[expert] - start
        low, high = 0, outputs
        if count > 0:
            # Both ends are rounded down, so that neighbouring shares meet.
            low = min(max((first - start * outputs) // count, 0), outputs)
            high = min(max((last - start * outputs) // count, 0), outputs)
        elif part > 0:
            high = 0
        if low < high:
            if has_bias:
                for c in range(low, high):
                    grad_bias[expert, c] = 0
                for row in range(start, stops[expert]):
                    for c in range(low, high):
                        grad_bias[expert, c] += grad[row, c]
            if count == 0:
                for c in range(outputs):
                    for i in range(inputs):
                        grad_weight[expert, c, i] = 0
            elif inputs > 0:
                addresses = (
                    _address(rows, start * inputs),
                    _address(grad, start * outputs + low),
                    _address(grad_weight, (expert * outputs + low) * inputs),
                )
                sizes, strides = (inputs, high - low, count), (inputs, outputs, inputs)
                multiply(False, True, sizes, strides, addresses, 0.0, numbers, scales)
        start = stops[expert]


@torch.library.custom_op("comet_moe::sorted_mm", mutates_args=())
def sorted_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Each row times the matrix of its expert: (M, p), (n, p, u), (n,) -> (M, u), 0 for rows of no expert."""
    product = F.grouped_mm(rows, weight, offs=offsets)
    row = torch.arange(rows.shape[0], device=rows.device)
    return product.masked_fill((row >= offsets[-1]).unsqueeze(-1), 0)


@torch.library.custom_op("comet_moe::sorted_outer", mutates_args=())
def sorted_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """The sum of the outer products of each expert's rows: (M, p), (M, u), (n,) -> (n, p, u)."""
    return F.grouped_mm(a.t(), b, offs=offsets)


@sorted_mm.register_fake
def _(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@sorted_outer.register_fake
def _(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    return (
        sorted_mm(grad, weight.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None,
        sorted_outer(rows, grad, offsets) if ctx.needs_input_grad[1] else None,
        None,
    )


sorted_mm.register_autograd(_backward, setup_context=_save)
