"""Matrix products of MKL, the library behind ``torch.mm`` on x86, called from compiled loops.

torch has loaded a copy of MKL; compiled code calls its functions by symbols. All arguments of BLAS are
addresses. Matrices here are row-major and MKL's are column-major, so a product C = A B is given to it as
Cᵗ = Bᵗ Aᵗ.
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

_sgemm: Any = None
_dgemm: Any = None
"""Functions of compiled code once numba is imported; their arguments are 13 addresses."""


@cache
def why_no_product() -> str:
    """Why MKL's products cannot be called, or "" if they can."""
    if why_not_numba():
        return why_not_numba()
    if not torch.backends.mkl.is_available():
        return "torch has no MKL: one torch.mm per expert"
    try:
        from llvmlite.binding import add_symbol

        library = ctypes.CDLL(str(min((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
        for name in FUNCTIONS.values():
            add_symbol(f"comet_moe_{name}", ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    except Exception as error:  # a name that has moved
        reason = f"compiled code cannot call MKL ({type(error).__name__}: {error})"
        return warn_slower(f"{reason}: one torch.mm per expert")
    return ""


@extends_numba
def _declare_products() -> None:
    from numba import types

    global _sgemm, _dgemm
    signature = types.void(*[types.int64] * 13)
    _sgemm, _dgemm = (types.ExternalFunction(f"comet_moe_{name}", signature) for name in FUNCTIONS.values())


@jit
def multiply(
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
    beta_address = scale + scales.itemsize
    if scales.itemsize == 4:
        _sgemm(letter_a, letter_b, m, n, length, scale, a, stride_a, b, stride_b, beta_address, c, stride_c)
    else:
        _dgemm(letter_a, letter_b, m, n, length, scale, a, stride_a, b, stride_b, beta_address, c, stride_c)
