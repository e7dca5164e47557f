"""A batch size that is not given: enough optimiser steps on a small table, few calls on a large one."""

import pytest

from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.config.schema import rows_per_step, steps_per_epoch


@pytest.mark.parametrize(
    ("rows", "batch", "steps"), [(300, 32, 10), (2450, 76, 33), (32_768, 1024, 32), (10**6, 1024, 977)]
)
def test_a_table_of_any_size_has_tens_of_steps_per_epoch(rows, batch, steps):
    batch_size = load_train_config("table").training.batch_size
    assert rows_per_step(rows, batch_size) == batch
    assert steps_per_epoch(rows, batch_size) == steps


def test_a_given_batch_size_is_used_and_null_unsets_it():
    assert rows_per_step(10**6, 7) == 7
    assert load_train_config("digits", ["training.batch_size=null"]).training.batch_size is None
