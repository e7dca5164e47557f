"""bfloat16 in compiled loops: numpy has no such type, so its 16 bits travel as unsigned integers.

A bfloat16 is the upper half of a float32. :func:`load` adds a lower half of zeros; :func:`store` rounds to
the nearest, ties to even, as torch does. Loops compute in float32 in between; for arrays of floats both are
the identity.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from comet_moe.kernels.jit import NUMBA_ENABLED


def as_storage(tensor: Tensor) -> Any:
    """A contiguous ``tensor`` without gradient as a numpy array of its memory, bfloat16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def load(value: Any) -> Any:
    """The number that an array of :func:`as_storage` holds; for compiled functions only."""
    raise NotImplementedError


def store(array: Any, index: Any, value: Any) -> None:
    """``array[index] = value``, rounded to the type of ``array``; for compiled functions only."""
    raise NotImplementedError


if NUMBA_ENABLED:
    from numba import types
    from numba.extending import overload

    @overload(load, inline="always")
    def _load(value: Any) -> Any:
        if value == types.uint16:

            def widen(value: Any) -> Any:
                return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)

            return widen

        def keep(value: Any) -> Any:
            return value

        return keep

    @overload(store, inline="always")
    def _store(array: Any, index: Any, value: Any) -> Any:
        if array.dtype != types.uint16:

            def copy(array: Any, index: Any, value: Any) -> None:
                array[index] = value

            return copy

        def narrow(array: Any, index: Any, value: Any) -> None:
            bits = np.float32(value).view(np.uint32)
            is_odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
            rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + is_odd)
            # Rounding up could make an infinity of a NaN.
            is_nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            array[index] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded >> np.uint32(16))

        return narrow
