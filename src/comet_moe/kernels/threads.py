"""Rows shared out among torch's own threads.

torch's OpenMP threads wait actively for their next piece of work, so threads of our own would have to fight
them for the cores. Compiled loops are therefore run by the same team, through the OpenMP library that torch
has loaded; where there is none (macOS), by a pool. Loops release the GIL, any thread may call, and in a
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
"""Multiply-adds below which handing rows to a thread costs more than it saves."""

_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_note_fork)


def over_rows(loop: Callable[[int, int], Any], rows: int, work: int) -> list[Any]:
    """``loop(start, stop)`` over all rows, in as many threads as torch has and the work is worth.

    Args:
        loop: works on rows start..stop-1, without the GIL.
        rows: in all.
        work: multiply-adds in all.

    Returns:
        What the calls returned.
    """
    threads = 1 if _forked else min(torch.get_num_threads(), rows, 1 + work // WORTH_A_THREAD)
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
    openmp = ctypes.CDLL(str(library))  # already loaded by torch: this only finds it
    body_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    openmp.GOMP_parallel.argtypes = [body_type, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    openmp.GOMP_parallel.restype = None

    def run(work: Callable[[int], Any], threads: int) -> list[Any]:
        results: dict[int, Any] = {}
        errors: list[BaseException] = []

        def body(_: None) -> None:
            # A nested or limited team may be smaller than asked for: each member takes every size-th part.
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
