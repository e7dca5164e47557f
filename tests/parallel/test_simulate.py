"""Simulated ranks have the loads and bytes that follow from the routing."""

import pytest
import torch
from benchmarks.simulate import simulate_ranks

from comet_moe import Routing


def test_rows_and_outputs_of_other_ranks_are_counted():
    # Two ranks with two rows and two experts each: row 0 goes to both ranks, rows 1 and 2 to 1, row 3 to 0.
    weights = torch.tensor([[0.5, 0, 0.5, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]])
    load = simulate_ranks(Routing(weights=weights), ranks=2, row_bytes=10, output_bytes=1)
    assert load.load_ratio == 3 / 2.5
    assert load.remote_share == pytest.approx(3 / 5)
    assert load.mean_bytes == (2 * 10 + 1 + 10 + 2) / 2
    assert load.max_bytes == 2 * 10 + 1  # rank 0 sends two rows, and an output of its experts
    assert load.bytes_per_row == 33 / 4
    assert load.idle_experts == 1 / 4


def test_one_rank_sends_nothing():
    load = simulate_ranks(Routing(weights=torch.rand(5, 3)), ranks=1, row_bytes=8, output_bytes=8)
    assert (load.load_ratio, load.remote_share, load.max_bytes) == (1, 0, 0)
