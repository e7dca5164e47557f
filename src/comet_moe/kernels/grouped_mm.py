"""Matrix products of rows that are sorted by expert, each expert with its own weights.

Shapes: M rows sorted by expert, n experts, p inputs, u outputs. Products of a few dozen rows are too small to
share among threads one by one. Here each thread has an equal share of all rows, or of all rows of the
weights' gradients, whichever experts they belong to, and multiplies by itself; biases are written and summed
while their rows are in its cache. The products are those of MKL, the library behind ``torch.mm`` on x86, of
which torch has loaded a copy. Where torch has another library (ARM, macOS), :func:`can_group` is False and
callers use one ``torch.mm`` per expert, the definition.

All matrices are row-major. MKL is column-major, so a product C = A B is given to it as Cᵗ = Bᵗ Aᵗ.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comet_moe.checks import has_dispatch_mode
from comet_moe.kernels.autograd import parameter_as_array
from comet_moe.kernels.jit import NUMBA_ENABLED, can_run_compiled, internals_are_tested, jit
from comet_moe.kernels.team import run_in_team
from comet_moe.kernels.threads import over_rows

FUNCTIONS = {torch.float32: "sgemm_64_", torch.float64: "dgemm_64_"}
"""MKL's names of the product with 64-bit integers, whichever integers torch was built with."""


def can_group(*tensors: Tensor) -> bool:
    """Whether the functions of this module can take these tensors.

    Not under a dispatch mode, such as a FLOP counter, which has to see the products.
    """
    dtype = tensors[0].dtype
    return (
        dtype in FUNCTIONS
        and can_run_compiled(*tensors)
        and all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)
        and not has_dispatch_mode()
        and _gemm(dtype) is not None
    )


def grouped_mm(rows: Tensor, weight: Tensor, bias: Tensor, stops: npt.NDArray[np.int64]) -> Tensor:
    """W_e x + b_e for each row x of expert e: (M, p), (n, u, p), (n, u) -> (M, u).

    Args:
        rows: sorted by expert.
        weight, bias: those of all experts.
        stops: (n,) where the rows of each expert end.
    """
    outputs, inputs = weight.shape[1:]
    out = rows.new_empty(len(rows), outputs)
    arrays = (rows.numpy(), parameter_as_array(weight), parameter_as_array(bias), out.numpy())
    work = len(rows) * inputs * outputs
    over_rows(_forward, _forward_in_team, len(rows), work, _gemm(rows.dtype), stops, *arrays)
    return out


def grouped_mm_backward(
    grad: Tensor,
    rows: Tensor | None,
    weight: Tensor | None,
    stops: npt.NDArray[np.int64],
    needs_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of :func:`grouped_mm`; those of experts without rows are 0.

    Args:
        grad: (M, u), gradient of the outputs.
        rows: (M, p); None if the gradient of the weights is not needed.
        weight: (n, u, p); None if the gradient of the rows is not needed.
        stops: (n,) where the rows of each expert end.
        needs_bias: whether the gradient of the biases is needed.
    """
    outputs, experts = grad.shape[1], len(stops)
    function = _gemm(grad.dtype)
    grad_rows = grad_weight = grad_bias = None
    if weight is not None:
        grad_rows = grad.new_empty(len(grad), weight.shape[2])
        factors = (grad.numpy(), parameter_as_array(weight))
        work = grad.numel() * weight.shape[2]
        over_rows(
            *(_backward_rows, _backward_rows_in_team, len(grad), work),
            *(function, stops, *factors, grad_rows.numpy()),
        )
    if rows is not None or needs_bias:
        factor = grad.new_empty(len(grad), 0) if rows is None else rows
        grad_weight = grad.new_empty(experts, outputs, factor.shape[1])
        grad_bias = grad.new_empty(experts if needs_bias else 0, outputs)
        results = (parameter_as_array(grad_weight), parameter_as_array(grad_bias))
        # A unit of work is one row of the gradient of an expert's weights times one row of the expert.
        units, work = grad.numel(), grad.numel() * factor.shape[1]
        over_rows(
            *(_backward_weight, _backward_weight_in_team, units, work),
            *(function, stops, grad.numpy(), factor.numpy(), *results),
        )
    return (
        grad_rows,
        grad_weight if rows is not None else None,
        grad_bias if needs_bias else None,
    )


@cache
def _gemm(dtype: torch.dtype) -> int | None:
    """The address of MKL's product of matrices of this type; None where torch has no MKL.

    Nor with versions of numba for which :func:`_call_gemm` was not tested.
    """
    if not internals_are_tested():
        return None
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        function = getattr(ctypes.CDLL(str(path)), FUNCTIONS[dtype], None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


if NUMBA_ENABLED:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    def _generate_gemm(
        context: Any, function: Any, flags: Any, sizes: Any, scales: Any, addresses: Any, strides: Any
    ) -> Any:
        """BLAS's C = alpha op(A) op(B) + beta C, column-major; every argument is passed by its address."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            function, *tuples = values
            flags, sizes, scales, addresses, strides = (
                cgutils.unpack_tuple(builder, values, len(kinds))
                for values, kinds in zip(tuples, signature.args[1:], strict=True)
            )
            byte = ir.IntType(8).as_pointer()

            def passed(value: Any) -> Any:
                return builder.bitcast(cgutils.alloca_once_value(builder, value), byte)

            a, b, c = (builder.inttoptr(address, byte) for address in addresses)
            stride_a, stride_b, stride_c = map(passed, strides)
            alpha, beta = map(passed, scales)
            letters = [builder.trunc(flag, ir.IntType(8)) for flag in flags]
            given = [*map(passed, letters), *map(passed, sizes), alpha, a, stride_a, b, stride_b, beta, c]
            given.append(stride_c)
            kind = ir.FunctionType(ir.VoidType(), [byte] * len(given))
            builder.call(builder.inttoptr(function, kind.as_pointer()), given)
            return context.get_dummy_value()

        return types.none(function, flags, sizes, scales, addresses, strides), generate

    _call_gemm: Callable[..., None] = intrinsic(_generate_gemm)

else:

    def _call_gemm(*arguments: Any) -> None:
        """Only called by compiled functions, which do not exist without numba."""


PLAIN, TRANSPOSED = ord("N"), ord("T")


@jit
def _address(matrix: Any, row: int) -> int:
    """Where a row of a contiguous ``matrix`` (rows, width) begins in memory."""
    return matrix.ctypes.data + row * matrix.shape[1] * matrix.itemsize


@jit
def _first_expert(stops: Any, row: int) -> int:
    """The expert of a row."""
    return int(np.searchsorted(stops, row, side="right"))


@jit
def _forward(
    part: int, first: int, last: int, gemm: int, stops: Any, rows: Any, weight: Any, bias: Any, out: Any
) -> None:
    outputs, inputs = weight.shape[1:]
    one = out.dtype.type(1)
    expert = _first_expert(stops, first)
    start = first
    while start < last:
        stop = min(last, stops[expert])
        if start < stop:
            for row in range(start, stop):
                out[row] = bias[expert]
            addresses = (_address(weight[expert], 0), _address(rows, start), _address(out, start))
            sizes = (outputs, stop - start, inputs)
            _call_gemm(gemm, (TRANSPOSED, PLAIN), sizes, (one, one), addresses, (inputs, inputs, outputs))
            start = stop
        expert += 1


@jit
def _backward_rows(
    part: int, first: int, last: int, gemm: int, stops: Any, grad: Any, weight: Any, grad_rows: Any
) -> None:
    outputs, inputs = weight.shape[1:]
    one, zero = grad.dtype.type(1), grad.dtype.type(0)
    expert = _first_expert(stops, first)
    start = first
    while start < last:
        stop = min(last, stops[expert])
        if start < stop:
            addresses = (_address(weight[expert], 0), _address(grad, start), _address(grad_rows, start))
            sizes = (inputs, stop - start, outputs)
            _call_gemm(gemm, (PLAIN, PLAIN), sizes, (one, zero), addresses, (inputs, outputs, inputs))
            start = stop
        expert += 1


@jit
def _backward_weight(
    part: int,
    first: int,
    last: int,
    gemm: int,
    stops: Any,
    grad: Any,
    rows: Any,
    grad_weight: Any,
    grad_bias: Any,
) -> None:
    """Expert by expert, the rows of its gradient whose work lies in ``first`` to ``last``."""
    experts, outputs, inputs = grad_weight.shape
    one, zero = grad.dtype.type(1), grad.dtype.type(0)
    has_bias = len(grad_bias) > 0
    start = 0
    for expert in range(experts):
        count = stops[expert] - start
        if count == 0:
            if part == 0:
                grad_weight[expert] = 0
                if has_bias:
                    grad_bias[expert] = 0
            continue
        # Both ends are rounded down, so that neighbouring shares meet.
        low = min(max((first - start * outputs) // count, 0), outputs)
        high = min(max((last - start * outputs) // count, 0), outputs)
        if low < high:
            if has_bias:
                total = grad_bias[expert, low:high]
                total[:] = 0
                for row in range(start, stops[expert]):
                    for c in range(high - low):
                        total[c] += grad[row, low + c]
            own_grad = _address(grad, start) + low * grad.itemsize
            addresses = (_address(rows, start), own_grad, _address(grad_weight[expert], low))
            sizes = (inputs, high - low, count)
            _call_gemm(gemm, (PLAIN, TRANSPOSED), sizes, (one, zero), addresses, (inputs, outputs, inputs))
        start = stops[expert]


@jit
def _forward_in_team(team: Any, parts: int, rows: int, *arguments: Any) -> bool:
    return run_in_team(_forward, team, parts, rows, arguments)


@jit
def _backward_rows_in_team(team: Any, parts: int, rows: int, *arguments: Any) -> bool:
    return run_in_team(_backward_rows, team, parts, rows, arguments)


@jit
def _backward_weight_in_team(team: Any, parts: int, rows: int, *arguments: Any) -> bool:
    return run_in_team(_backward_weight, team, parts, rows, arguments)
