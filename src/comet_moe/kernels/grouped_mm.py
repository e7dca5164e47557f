"""Many small matrix products in one call, which deals them out to the threads.

Products of a few dozen rows are too small to share among threads one by one. MKL, the library behind
``torch.mm`` on x86, takes a list of products of different sizes and gives each thread products of its own. It
is called through the library that torch has loaded, with torch's number of threads. Where torch has another
library (ARM, macOS), :func:`can_group` is False and callers use one ``torch.mm`` per product, the definition.

All matrices are row-major. MKL is column-major, so a product C = A B is given to it as Cᵗ = Bᵗ Aᵗ.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comet_moe.checks import has_dispatch_mode
from comet_moe.kernels.jit import can_run_compiled

Integers = npt.NDArray[np.int64]

MIN_GROUPS = 8
"""With fewer products than this, sharing each one among the threads is as fast."""

FUNCTIONS = {torch.float32: ("sgemm_batch_64_", np.float32), torch.float64: ("dgemm_batch_64_", np.float64)}
"""MKL's names of the call with 64-bit integers, whichever integers torch was built with."""


class Matrices(NamedTuple):
    """g matrices whose rows are ``stride`` numbers apart: ``address`` (g,) of their first numbers."""

    address: Integers
    stride: int
    transposed: bool = False


class Products(NamedTuple):
    """C_e = A_e B_e for g groups e, A_e of shape (m, k), B_e of (k, n); sizes are numbers or (g,).

    With ``adds``, C_e is increased by the product.
    """

    m: int | Integers
    n: int | Integers
    k: int | Integers
    a: Matrices
    b: Matrices
    c: Matrices
    adds: bool = False


def rows_from(matrix: Tensor, first: Integers, transposed: bool = False) -> Matrices:
    """The matrices that begin in rows ``first`` (g,) of a contiguous ``matrix`` (rows, width)."""
    width = matrix.shape[1]
    return Matrices(matrix.data_ptr() + first * (width * matrix.element_size()), width, transposed)


def can_group(*tensors: Tensor) -> bool:
    """Whether :func:`multiply` can take these tensors.

    Not under a dispatch mode, such as a FLOP counter, which has to see the products.
    """
    dtype = tensors[0].dtype
    return (
        dtype in FUNCTIONS
        and can_run_compiled(*tensors)
        and all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)
        and not has_dispatch_mode()
        and _function(dtype) is not None
    )


def multiply(products: Sequence[Products], dtype: torch.dtype) -> None:
    """Compute all products, in any order and at the same time: none may read what another writes."""
    function = _function(dtype)
    assert function is not None
    groups = [len(product.c.address) for product in products]
    total = sum(groups)
    table = np.empty((10, total), np.int64)  # n, m, k, B, stride, A, stride, C, stride, size of the group
    table[9] = 1
    factors = np.ones((2, total), FUNCTIONS[dtype][1])
    transposed_a, transposed_b = b"", b""
    start = 0
    for product, count in zip(products, groups, strict=True):
        part = table[:, start : start + count]
        part[0], part[1], part[2] = product.n, product.m, product.k
        for row, matrices in ((3, product.b), (5, product.a), (7, product.c)):
            part[row], part[row + 1] = matrices.address, matrices.stride
        factors[1, start : start + count] = product.adds
        transposed_a += (b"T" if product.a.transposed else b"N") * count
        transposed_b += (b"T" if product.b.transposed else b"N") * count
        start += count
    n, m, k, b, stride_b, a, stride_a, c, stride_c, size = _row_addresses(table)
    alpha, beta = _row_addresses(factors)
    number = ctypes.byref(ctypes.c_int64(total))
    function(
        *(transposed_b, transposed_a, n, m, k, alpha, b, stride_b, a, stride_a, beta, c, stride_c),
        *(number, size),
    )


def _row_addresses(table: npt.NDArray[Any]) -> range:
    """The address of each row of a contiguous ``table``."""
    first, width = table.ctypes.data, table.strides[0]
    return range(first, first + width * len(table), width)


@cache
def _function(dtype: torch.dtype) -> Any:
    """MKL's call for numbers of this type; None where torch has no MKL."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        function = getattr(ctypes.CDLL(str(path)), FUNCTIONS[dtype][0], None)
        if function is not None:
            function.argtypes = [*[ctypes.c_char_p] * 2, *[ctypes.c_void_p] * 13]
            function.restype = None
            return function
    return None
