"""Loops in torch's own team of threads.

torch's OpenMP threads wait actively for their next task, so threads of our own would compete with them for
the cores. A loop therefore starts in the same team, through the OpenMP library that torch has loaded. Each
member of the team takes the interpreter's lock for the few microseconds until its compiled loop begins.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from comet_moe.kernels.jit import warn_slower

_MEMBER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def find_team() -> tuple[ctypes.CDLL | None, str]:
    """The OpenMP library that torch has loaded, or None and why there is no team."""
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not libraries:
        return None, "torch has no libgomp: loops run in a thread pool"
    try:
        openmp = ctypes.CDLL(str(libraries[0]))  # torch has loaded it already: this gives the same library
        for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"):
            getattr(openmp, name)
    except (OSError, AttributeError) as error:
        return None, warn_slower(f"torch's {libraries[0].name} has no team of threads to start ({error})")
    return openmp, ""


def run_in_team(
    openmp: ctypes.CDLL, loop: Callable[..., Any], parts: int, rows: int, *arguments: Any
) -> None:
    """Call ``loop(part, first, last, *arguments)`` for ``parts`` ranges that cover all rows, in a team."""
    errors: list[BaseException] = []

    def member(_: int | None) -> None:
        try:
            # A nested or limited team may be smaller than parts: each member takes every size-th part.
            for part in range(openmp.omp_get_thread_num(), parts, openmp.omp_get_num_threads()):
                loop(part, rows * part // parts, rows * (part + 1) // parts, *arguments)
        except BaseException as error:  # nothing else can leave a function that C calls
            errors.append(error)

    openmp.GOMP_parallel(_MEMBER(member), None, parts, 0)
    if errors:
        raise errors[0]
