"""Rows are split among threads, each once, and errors come back."""

import pytest
import torch

from comet_moe.kernels.threads import WORTH_A_THREAD, _pool_team, over_rows


def test_threads_and_pool_cover_every_row_once():
    for team in (lambda loop, rows: over_rows(loop, rows, 100 * WORTH_A_THREAD), pool):
        seen = torch.zeros(1001)

        def count(first, last, seen=seen):
            seen[first:last] += 1

        team(count, 1001)
        assert torch.equal(seen, torch.ones(1001))


def pool(loop, rows):
    _pool_team(lambda part: loop(rows * part // 3, rows * (part + 1) // 3), 3)


def test_an_error_in_a_thread_is_raised():
    def fail(first, last):
        raise RuntimeError("in a thread")

    with pytest.raises(RuntimeError, match="in a thread"):
        over_rows(fail, 100, 100 * WORTH_A_THREAD)
