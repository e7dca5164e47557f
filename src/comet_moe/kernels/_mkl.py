"""Matrix products of MKL, the library behind ``torch.mm`` on x86, called from compiled loops.

torch has loaded a copy of MKL; its function is called by its address. All arguments of BLAS are addresses.
Matrices here are row-major and MKL's are column-major, so a product C = A B is given to it as Cᵗ = Bᵗ Aᵗ.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from comet_moe.kernels.jit import extends_numba, jit, warn_slower, why_not_numba

FUNCTIONS = {torch.float32: "sgemm_64_", torch.float64: "dgemm_64_"}
"""MKL's names of the product with 64-bit integers, whichever integers torch was built with."""

PLAIN, TRANSPOSED = ord("N"), ord("T")
ARGUMENTS = 13

_call: Any = None
"""``_call(address, (13 arguments))`` within compiled functions, once numba is imported."""


@cache
def find_product(dtype: torch.dtype) -> tuple[int, str]:
    """The address of MKL's product of matrices of this type, or 0 and why it cannot be called."""
    if why_not_numba():
        return 0, why_not_numba()
    if not torch.backends.mkl.is_available():
        return 0, "torch has no MKL: one torch.mm per expert"
    try:
        _try_call()
    except Exception as error:  # a name of llvmlite that has moved, or LLVM's refusal
        reason = f"llvmlite calls no function by its address ({type(error).__name__}: {error})"
        return 0, warn_slower(f"{reason}: one torch.mm per expert")
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        function = getattr(ctypes.CDLL(str(path)), FUNCTIONS[dtype], None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value or 0, ""
    return 0, warn_slower(f"torch's MKL has no function {FUNCTIONS[dtype]}: one torch.mm per expert")


@jit
def multiply(
    gemm: int,
    transposes_a: bool,
    transposes_b: bool,
    sizes: tuple[int, int, int],
    strides: tuple[int, int, int],
    addresses: Any,
    beta: float,
    numbers: Any,
    scales: Any,
) -> None:
    """C = op(A) op(B) + beta C of column-major matrices, for compiled functions.

    Args:
        gemm: address of MKL's function.
        transposes_a, transposes_b: whether op is the transpose.
        sizes: rows of C, columns of C, and the length of the sums.
        strides: from one column to the next of A, B and C.
        addresses: of A, B and C.
        beta: 0 or 1.
        numbers, scales: memory to pass values in: 8 int64, and 2 numbers of the matrices' type.
    """
    numbers[0] = TRANSPOSED if transposes_a else PLAIN
    numbers[1] = TRANSPOSED if transposes_b else PLAIN
    for i in range(3):
        numbers[2 + i], numbers[5 + i] = sizes[i], strides[i]
    scales[0], scales[1] = 1, beta
    number, scale = np.int64(numbers.ctypes.data), np.int64(scales.ctypes.data)
    letter_a, letter_b, m, n, length = number, number + 8, number + 16, number + 24, number + 32
    stride_a, stride_b, stride_c = number + 40, number + 48, number + 56
    a, b, c = addresses
    alpha, beta_address = scale, scale + scales.itemsize
    _call(
        gemm,
        (letter_a, letter_b, m, n, length, alpha, a, stride_a, b, stride_b, beta_address, c, stride_c),
    )


def _generate_call(builder: Any, address: Any, arguments: list[Any]) -> None:
    """LLVM's instructions that call the function at ``address`` with integers, which may be addresses."""
    from llvmlite import ir

    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * len(arguments))
    builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)


def _try_call() -> None:
    """Generate a call in a function that is never run, and let LLVM read it."""
    from llvmlite import binding, ir

    module, word = ir.Module(), ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [word]), "calls")
    builder = ir.IRBuilder(function.append_basic_block())
    _generate_call(builder, function.args[0], [word(0)] * ARGUMENTS)
    builder.ret_void()
    binding.parse_assembly(str(module)).verify()


@extends_numba
def _define_call() -> None:
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def call(context: Any, address: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            address, given = values
            _generate_call(builder, address, [builder.extract_value(given, i) for i in range(ARGUMENTS)])
            return address

        return types.int64(types.int64, types.UniTuple(types.int64, ARGUMENTS)), generate

    global _call
    _call = call
