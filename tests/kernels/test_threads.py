"""Rows are split among threads, each once; a loop without memory is an error."""

import numpy as np
import pytest
import torch

from comet_moe.kernels import threads
from comet_moe.kernels._openmp import find_team, run_in_team
from comet_moe.kernels.descent import descend, read_trees
from comet_moe.kernels.jit import NUMBA_ENABLED, jit
from comet_moe.kernels.threads import WORTH_A_THREAD, count_threads, over_rows, run_in_pool

pytestmark = pytest.mark.skipif(not NUMBA_ENABLED, reason="numba is not installed")


@jit
def count(part, first, last, seen, sizes, fails):
    if fails and part == fails:
        np.empty(1 << 56)
    for row in range(first, last):
        seen[row] += 1
    sizes[part] = last - first


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def make_arrays():
    return np.zeros(1001, np.int64), np.zeros(3, np.int64)


needs_team = pytest.mark.skipif(find_team()[0] is None, reason="torch has another library of threads here")


def in_team(loop, *arguments):
    run_in_team(find_team()[0], loop, *arguments)


@pytest.mark.parametrize("run", [over_rows, pytest.param(in_team, marks=needs_team), run_in_pool])
def test_every_row_is_in_one_part(run):
    seen, sizes = make_arrays()
    run(count, 3, 1001, seen, sizes, 0)
    assert (seen == 1).all()
    assert sizes.tolist() == [333, 334, 334]


def test_without_openmp_rows_go_to_a_pool(monkeypatch):
    monkeypatch.setattr(threads, "find_team", lambda: (None, "switched off"))
    monkeypatch.setattr(threads, "run_in_team", None)
    seen, sizes = make_arrays()
    over_rows(count, 3, 1001, seen, sizes, 0)
    assert (seen == 1).all()


@needs_team
def test_a_team_within_a_team_is_smaller_and_covers_every_row():
    """The inner team has one member, which takes all parts."""
    seen, sizes = np.zeros((3, 1001), np.int64), np.zeros((3, 3), np.int64)

    def outer(part, first, last):
        for row in range(first, last):
            in_team(count, 3, 1001, seen[row], sizes[row], 0)

    in_team(outer, 3, 3)
    assert (seen == 1).all()
    assert (sizes == [333, 334, 334]).all()


def test_small_work_stays_in_one_thread():
    assert count_threads(1001, WORTH_A_THREAD - 1) == 1
    assert count_threads(1001, 100 * WORTH_A_THREAD) == 3
    assert count_threads(2, 100 * WORTH_A_THREAD) == 2


@pytest.mark.parametrize("part", [1, 2])
def test_a_part_without_memory_is_an_error(part):
    with pytest.raises(MemoryError):
        over_rows(count, 3, 1001, *make_arrays(), part)


def test_a_descent_asks_for_the_number_of_threads_once(monkeypatch):
    """Another thread may change it, and each part of the walk writes its own entry of an array."""
    asked = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: asked.append(True) or 2)
    monkeypatch.setattr(threads, "WORTH_A_THREAD", 1)
    k, n, p = 2, 4, 3
    shapes = (k, n - 1, p), (k, n - 1), (k, n, p), (k, n)
    trees = read_trees([torch.zeros(shape) for shape in shapes], torch.float32)
    assert descend(torch.zeros(5, p), trees, 1.0).visited == 5 * k * (2 * n - 1)
    assert len(asked) == 1
