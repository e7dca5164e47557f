"""The measurement of expert parallelism, on two processes."""

import pytest
from benchmarks.parallel import measure_parallel


@pytest.mark.slow
def test_a_forward_pass_sends_no_more_than_the_bound():
    step, sent = measure_parallel(quick=True)
    assert step.ratio.pairs == 6
    assert step.value > 0
    assert 0 < sent.value <= sent.target == 1.0
