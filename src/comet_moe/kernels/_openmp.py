"""torch's own team of threads, which compiled loops run in.

torch's OpenMP threads wait actively for their next task, so threads of our own would compete with them for
the cores. Loops therefore start in the same team, through the OpenMP library that torch has loaded. Compiled
code calls it by symbols, so that it can be kept on disk.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from comet_moe.kernels.jit import extends_numba, warn_slower

SYMBOLS = "comet_moe_thread", "comet_moe_threads"
"""The number of a thread and the size of its team, for compiled code."""


class Team(NamedTuple):
    """OpenMP's functions: start a team, the number of a thread, the size of its team."""

    start: Any
    number: Any
    size: Any


@cache
def find_team() -> tuple[Team | None, str]:
    """The functions of the OpenMP library that torch has loaded, or None and why there is no team."""
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not libraries:
        return None, "torch has no libgomp: loops run in a thread pool"
    try:
        openmp = ctypes.CDLL(str(libraries[0]))  # torch has loaded it already: this gives the same library
        team = Team(openmp.GOMP_parallel, openmp.omp_get_thread_num, openmp.omp_get_num_threads)
    except (OSError, AttributeError) as error:
        return None, warn_slower(f"torch's {libraries[0].name} has no team of threads to start ({error})")
    team.start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    team.start.restype = None
    return team, ""


def position_functions() -> list[Any]:
    """The functions of :data:`SYMBOLS`, for compiled code."""
    from numba import types

    return [types.ExternalFunction(symbol, types.int32()) for symbol in SYMBOLS]


@ctypes.CFUNCTYPE(ctypes.c_int)
def _no_position() -> int:
    """Linked where there is no team, and never called."""
    return 0


@extends_numba
def _define_symbols() -> None:
    from llvmlite.binding import add_symbol

    team, _ = find_team()
    functions = (_no_position, _no_position) if team is None else team[1:]
    for symbol, function in zip(SYMBOLS, functions, strict=True):
        add_symbol(symbol, ctypes.cast(function, ctypes.c_void_p).value)
