"""When compiled loops can run, and how they are compiled."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

# Sums may be reordered, so that they vectorise; NaN and infinity keep their meaning.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


@cache
def numba_installed() -> bool:
    """Whether numba can be imported."""
    return find_spec("numba") is not None


def runs_here(*tensors: Tensor) -> bool:
    """Whether compiled loops can take these tensors: eager mode, on the CPU, float32 or float64."""
    return (
        not torch.compiler.is_compiling()
        and numba_installed()
        and all(t.device.type == "cpu" and t.dtype in (torch.float32, torch.float64) for t in tensors)
        and all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
    )


def compiled(function: Function) -> Function:
    """``function`` compiled at its first call, and from then on in a cache on disk. Releases the GIL."""
    loaded: list[Callable[..., Any]] = []

    def call(*arguments: Any) -> Any:
        if not loaded:
            import numba

            loaded.append(numba.njit(cache=True, nogil=True, fastmath=FASTMATH)(function))
        return loaded[0](*arguments)

    return call  # type: ignore[return-value]
