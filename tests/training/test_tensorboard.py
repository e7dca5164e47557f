"""TensorBoard on request: one scalar for every number of an epoch's record, as TensorBoard reads them."""

import pytest

from comet_moe.training.tracking import TensorBoard


def test_numbers_are_written_by_their_path_and_lists_are_left_out(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with TensorBoard(tmp_path) as board:
        board.on_epoch({"epoch": 3, "train_loss": 0.5, "tau": None, "usage": {"share": [1, 2], "experts": 2}})
    events = reading.EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"train_loss", "usage/experts"}
    (event,) = events.Scalars("usage/experts")
    assert (event.step, event.value) == (3, 2.0)
