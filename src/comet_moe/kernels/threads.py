"""Splits the rows of a batch among torch's own threads.

Loops run in torch's OpenMP team (:mod:`comet_moe.kernels.team`); where there is none (macOS, Windows), in a
thread pool. Loops release the GIL, and any thread may call. In a forked child, where a team does not survive,
they run in one thread.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from comet_moe.kernels.team import openmp_team

WORTH_A_THREAD = 250_000
"""Multiply-adds below which a further thread costs more time than it saves."""

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


def over_rows(
    loop: Callable[..., Any], in_team: Callable[..., Any], rows: int, work: int, *arguments: Any
) -> int:
    """Call ``loop(part, first, last, *arguments)`` for ranges of rows that cover all of them, in threads.

    Args:
        loop: a compiled function that works on rows first..last-1 and returns nothing.
        in_team: ``loop`` in a team, by :func:`comet_moe.kernels.team.run_in_team`.
        rows: total number of rows.
        work: total number of multiply-adds.
        arguments: numbers and arrays.

    Returns:
        The number of parts.
    """
    threads = count_threads(rows, work)
    if threads == 1:
        loop(0, 0, rows, *arguments)
        return 1
    team = openmp_team()
    if team is None:
        run_in_pool(loop, threads, rows, *arguments)
    elif not in_team(team, threads, rows, *arguments):
        raise MemoryError("a compiled loop had no memory for its work space")
    return threads


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
