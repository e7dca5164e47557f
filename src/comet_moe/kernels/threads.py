"""Splits the rows of a batch among torch's own threads.

torch's OpenMP threads wait actively for their next task, so threads of our own would compete with them for
the cores. Compiled loops therefore run in the same OpenMP team, through the library that torch has loaded;
where there is none (macOS, Windows), in a thread pool. Loops release the GIL, and any thread may call. In a
forked child, where a team does not survive, they run in one thread.
"""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

WORTH_A_THREAD = 1_000_000
"""Multiply-adds below which a further thread costs more time than it saves."""

_is_forked = False


def _record_fork() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_record_fork)


def over_rows(loop: Callable[[int, int], Any], rows: int, work: int) -> list[Any]:
    """Call ``loop(start, stop)`` for ranges of rows that cover all of them, each in a thread.

    There are at most as many threads as torch has, fewer where the work is small.

    Args:
        loop: works on rows start..stop-1, without the GIL.
        rows: total number of rows.
        work: total number of multiply-adds.

    Returns:
        The results of the calls, in the order of their rows.
    """
    if work < WORTH_A_THREAD or _is_forked:
        return [loop(0, rows)]
    threads = min(torch.get_num_threads(), rows, 1 + work // WORTH_A_THREAD)
    if threads <= 1:
        return [loop(0, rows)]
    bounds = [rows * part // threads for part in range(threads + 1)]
    return _team()(lambda part: loop(bounds[part], bounds[part + 1]), threads)


Team = Callable[[Callable[[int], Any], int], list[Any]]


@cache
def _team() -> Team:
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return _openmp_team(libraries[0]) if libraries else _pool_team


def _openmp_team(library: Path) -> Team:
    openmp = ctypes.CDLL(str(library))  # torch has loaded it already: this gives the same library
    body_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    openmp.GOMP_parallel.argtypes = [body_type, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    openmp.GOMP_parallel.restype = None

    def run(work: Callable[[int], Any], threads: int) -> list[Any]:
        results: dict[int, Any] = {}
        errors: list[BaseException] = []

        def body(_: None) -> None:
            # A nested or limited team may be smaller than requested: each member takes every size-th part.
            try:
                for part in range(openmp.omp_get_thread_num(), threads, openmp.omp_get_num_threads()):
                    results[part] = work(part)
            except BaseException as error:
                errors.append(error)

        openmp.GOMP_parallel(body_type(body), None, threads, 0)
        if errors:
            raise errors[0]
        return [results[part] for part in range(threads)]

    return run


def _pool_team(work: Callable[[int], Any], threads: int) -> list[Any]:
    others = [_pool(threads).submit(work, part) for part in range(1, threads)]
    return [work(0), *(other.result() for other in others)]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="comet-moe")
