"""Rows are split among threads, each once; a loop without memory is an error."""

import ctypes

import numpy as np
import pytest
import torch

from comet_moe.kernels import threads
from comet_moe.kernels._openmp import find_team
from comet_moe.kernels.descent import descend, read_trees
from comet_moe.kernels.jit import NUMBA_ENABLED, jit
from comet_moe.kernels.threads import WORTH_A_THREAD, count_threads, over_rows

pytestmark = pytest.mark.skipif(not NUMBA_ENABLED, reason="numba is not installed")


@jit
def count(part, first, last, seen, sizes, fails):
    if part + 1 == fails:
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


def make_tensors():
    return torch.zeros(1001, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)


needs_team = pytest.mark.skipif(find_team()[0] is None, reason="torch has another library of threads here")


@pytest.fixture(params=[pytest.param("team", marks=needs_team), "pool"])
def threads_of(request, monkeypatch):
    """The two kinds of threads that rows are split among; the other one must not run."""
    if request.param == "pool":
        monkeypatch.setattr(threads, "find_team", lambda: (None, "switched off"))
    monkeypatch.setattr(threads, f"run_in_{'team' if request.param == 'pool' else 'pool'}", None)


def test_every_row_is_in_one_part(threads_of):
    seen, sizes = make_tensors()
    over_rows(count, 3, 1001, seen, sizes, 0)
    assert (seen == 1).all()
    assert sizes.tolist() == [333, 334, 334]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # numba prints its own
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_part_without_memory_is_an_error(threads_of, part):
    with pytest.raises(MemoryError):
        over_rows(count, 3, 1001, *make_tensors(), part + 1)


@needs_team
def test_a_team_runs_while_another_thread_holds_the_interpreter(monkeypatch):
    """A function of PYFUNCTYPE keeps the lock, so a part that needed it would wait for ever."""
    team = find_team()[0]
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    holding = ctypes.PYFUNCTYPE(None, *kinds)(ctypes.cast(team.start, ctypes.c_void_p).value)
    monkeypatch.setattr(threads, "find_team", lambda: (team._replace(start=holding), ""))
    seen, sizes = make_tensors()
    over_rows(count, 3, 1001, seen, sizes, 0)
    assert sizes.tolist() == [333, 334, 334]


@needs_team
def test_a_team_within_a_team_is_smaller_and_covers_every_row():
    """The inner team has one thread, which takes all parts."""
    team = find_team()[0]
    seen, sizes = torch.zeros(2, 1001, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def within(_):
        number = team.number()
        over_rows(count, 3, 1001, seen[number], sizes[number], 0)

    team.start(within, None, 2, 0)
    assert (seen == 1).all()
    assert sizes.tolist() == 2 * [[333, 334, 334]]


def test_a_loop_refuses_a_tensor_whose_values_are_not_in_order():
    seen, sizes = make_tensors()
    with pytest.raises(ValueError, match=r"needs contiguous tensors, got shape \(501,\) with strides \(2,\)"):
        over_rows(count, 3, 501, seen[::2], sizes, 0)


def test_small_work_stays_in_one_thread():
    assert count_threads(1001, WORTH_A_THREAD - 1) == 1
    assert count_threads(1001, 100 * WORTH_A_THREAD) == 3
    assert count_threads(2, 100 * WORTH_A_THREAD) == 2


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
