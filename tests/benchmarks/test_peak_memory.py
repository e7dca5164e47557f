"""The peak of a function's memory, whoever allocates it."""

import numpy as np
import pytest
import torch
from benchmarks.memory import measure_peak

MEGABYTES = 16


def make_both():
    return lambda: (torch.ones(MEGABYTES, 2**18), np.ones((MEGABYTES, 2**18), dtype=np.float32))


def make_nothing():
    kept = torch.ones(MEGABYTES, 2**18)  # before the call: does not count
    return lambda: kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "megabytes"),
    [(make_both, 2 * MEGABYTES), (make_nothing, 0)],
)
def test_the_peak_counts_what_torch_and_numpy_allocate_during_the_call(make, megabytes):
    peak = measure_peak(make)
    if peak is None:
        pytest.skip("the peak of a process is measured on Linux only")
    # Pages are counted per processor in batches, and Python itself needs a few for the call.
    assert peak / 2**20 == pytest.approx(megabytes, abs=0.5)
