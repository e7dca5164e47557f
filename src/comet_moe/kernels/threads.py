"""Splits the rows of a batch among torch's own threads.

Loops run in torch's OpenMP team (:mod:`comet_moe.kernels._openmp`); where there is none (macOS, Windows), in
a thread pool. Loops release the GIL, and any thread may call. In a forked child, where a team does not
survive, they run in one thread.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from comet_moe.kernels._openmp import find_team, run_in_team

WORTH_A_THREAD = 1_000_000
"""Multiply-adds below which a further thread costs more time, 20 to 40 microseconds, than it saves."""

_is_forked = False


def _record_fork() -> None:
    global _is_forked
    _is_forked = True


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_record_fork)


def count_threads(rows: int, work: int) -> int:
    """The number of threads for ``work`` multiply-adds on ``rows`` rows: torch's, fewer for small work."""
    if work < WORTH_A_THREAD or _is_forked:
        return 1
    return max(1, min(torch.get_num_threads(), rows, 1 + work // WORTH_A_THREAD))


def over_rows(loop: Callable[..., Any], parts: int, rows: int, *arguments: Any) -> None:
    """Call ``loop(part, first, last, *arguments)`` for ranges of rows that cover all of them, in threads.

    Args:
        loop: a compiled function that works on rows first..last-1 and returns nothing.
        parts: number of ranges, by :func:`count_threads`; arrays with an entry for each part have this size.
        rows: total number of rows.
        arguments: numbers and arrays.
    """
    if parts == 1:
        loop(0, 0, rows, *arguments)
        return
    openmp, _ = find_team()
    if openmp is None:
        run_in_pool(loop, parts, rows, *arguments)
    else:
        run_in_team(openmp, loop, parts, rows, *arguments)


def run_in_pool(loop: Callable[..., Any], parts: int, rows: int, *arguments: Any) -> None:
    """Call ``loop`` for ``parts`` ranges of rows, as :func:`over_rows`, in Python's threads."""

    def run(part: int) -> None:
        loop(part, rows * part // parts, rows * (part + 1) // parts, *arguments)

    others = [_pool(parts).submit(run, part) for part in range(1, parts)]
    run(0)
    for other in others:
        other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="comet-moe")
