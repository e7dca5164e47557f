"""Rows are split among threads, each once; a loop without memory is an error."""

import numpy as np
import pytest
import torch

from comet_moe.kernels import grouped_mm, threads
from comet_moe.kernels import jit as jit_module
from comet_moe.kernels.jit import NUMBA_ENABLED, jit
from comet_moe.kernels.team import openmp_team, run_in_team
from comet_moe.kernels.threads import WORTH_A_THREAD, over_rows, run_in_pool

pytestmark = pytest.mark.skipif(not NUMBA_ENABLED, reason="numba is not installed")


@jit
def count(part, first, last, seen, sizes, fails):
    if fails and part == fails:
        np.empty(1 << 62)
    for row in range(first, last):
        seen[row] += 1
    sizes[part] = last - first


@jit
def count_in_team(team, parts, rows, seen, sizes, fails):
    return run_in_team(count, team, parts, rows, (seen, sizes, fails))


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def make_arrays():
    return np.zeros(1001, np.int64), np.zeros(3, np.int64)


def test_a_team_covers_every_row_once():
    seen, sizes = make_arrays()
    assert over_rows(count, count_in_team, 1001, 100 * WORTH_A_THREAD, seen, sizes, 0) == 3
    assert (seen == 1).all()
    assert sizes.tolist() == [333, 334, 334]


def test_a_pool_covers_every_row_once():
    seen, sizes = make_arrays()
    run_in_pool(count, 3, 1001, seen, sizes, 0)
    assert (seen == 1).all()
    assert sizes.tolist() == [333, 334, 334]


def test_without_openmp_rows_go_to_a_pool(monkeypatch):
    monkeypatch.setattr(threads, "openmp_team", lambda: None)
    seen, sizes = make_arrays()
    assert over_rows(count, None, 1001, 100 * WORTH_A_THREAD, seen, sizes, 0) == 3
    assert (seen == 1).all()


def test_versions_of_numba_that_were_not_tested_use_the_pool_and_torch_products(monkeypatch):
    monkeypatch.setattr(jit_module, "NUMBA_LIMIT", (0, 1))
    cached = (openmp_team, grouped_mm._gemm)
    for function in cached:
        function.cache_clear()
    try:
        assert openmp_team() is None
        assert not grouped_mm.can_group(torch.zeros(1))
    finally:
        for function in cached:
            function.cache_clear()


@pytest.mark.skipif(openmp_team() is None, reason="torch has another library of threads here")
def test_a_team_within_a_team_is_smaller_and_covers_every_row():
    """A loop of a loop: the inner team has one member, which takes all parts."""
    seen, sizes = np.zeros((3, 1001), np.int64), np.zeros((3, 3), np.int64)
    assert outer_in_team(openmp_team(), 3, 3, openmp_team(), seen, sizes)
    assert (seen == 1).all()
    assert (sizes == [333, 334, 334]).all()


@jit
def outer(part, first, last, team, seen, sizes):
    for row in range(first, last):
        run_in_team(count, team, 3, 1001, (seen[row], sizes[row], 0))


@jit
def outer_in_team(team, parts, rows, inner_team, seen, sizes):
    return run_in_team(outer, team, parts, rows, (inner_team, seen, sizes))


def test_small_work_stays_in_one_thread():
    seen, sizes = make_arrays()
    assert over_rows(count, count_in_team, 1001, WORTH_A_THREAD - 1, seen, sizes, 0) == 1
    assert sizes.tolist() == [1001, 0, 0]


@pytest.mark.parametrize("part", [1, 2])
def test_a_part_without_memory_is_an_error(part):
    with pytest.raises(MemoryError):
        over_rows(count, count_in_team, 1001, 100 * WORTH_A_THREAD, *make_arrays(), part)
