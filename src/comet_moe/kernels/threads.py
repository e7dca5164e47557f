"""Splits the rows of a batch among torch's own threads.

Loops run in torch's OpenMP team (:mod:`comet_moe.kernels._openmp`); where there is none (macOS, Windows), in
a thread pool. The threads run compiled code only: none of them waits for the interpreter's lock. Any thread
may call. In a forked child, where a team does not survive, loops run in one thread.
"""

import os
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from comet_moe.kernels._openmp import Team, find_team
from comet_moe.kernels.jit import Loop
from comet_moe.kernels.members import Kind, find_member, read_arguments

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


def over_rows(loop: Loop, parts: int, rows: int, *arguments: Any) -> None:
    """Call ``loop(part, first, last, *arguments)`` for ranges of rows that cover all of them, in threads.

    Args:
        loop: a compiled function that works on rows first..last-1 and returns nothing.
        parts: number of ranges, by :func:`count_threads`; tensors with an entry for each part have this size.
        rows: total number of rows.
        arguments: numbers and contiguous tensors on the CPU.
    """
    words, kinds = read_arguments(arguments)
    run_words(loop, kinds, parts, rows, words)


def run_words(loop: Loop, kinds: tuple[Kind, ...], parts: int, rows: int, words: Sequence[int]) -> None:
    """As :func:`over_rows`, for arguments in the form in which members read them."""
    member = find_member(loop, kinds)
    if parts == 1:
        memory = _fill(1, rows, 0, words)
        member(memory[0])
        ended = memory[-1]
    else:
        team, _ = find_team()
        given = member, parts, rows, words
        ended = run_in_pool(*given) if team is None else run_in_team(team, *given)
    if ended != parts:
        raise MemoryError("a compiled loop had no memory for its work space")


def run_in_team(team: Team, member: Any, parts: int, rows: int, words: Sequence[int]) -> int:
    """The number of parts that ended, run by a team."""
    memory = _fill(parts, rows, -1, words)
    team.start(member, memory[0], parts, 0)
    return sum(memory[-parts:])


def run_in_pool(member: Any, parts: int, rows: int, words: Sequence[int]) -> int:
    """The number of parts that ended, run by Python's threads."""
    memories = [_fill(parts, rows, part, words) for part in range(parts)]
    others = [_pool(parts).submit(member, memory[0]) for memory in memories[1:]]
    member(memories[0][0])
    for other in others:
        other.result()
    return sum(memory[part - parts] for part, memory in enumerate(memories))


def _fill(parts: int, rows: int, part: int, words: Sequence[int]) -> "array[int]":
    """The words of a member, as :mod:`comet_moe.kernels.members` describes them."""
    memory = array("q", [0, parts, rows, part, *words, *[0] * parts])
    memory[0] = memory.buffer_info()[0]
    return memory


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="comet-moe")
