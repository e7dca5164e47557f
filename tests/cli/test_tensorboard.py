"""TensorBoard on request: one scalar for every number of an epoch's record, as TensorBoard reads them."""

import pytest

from comet_moe.cli._display import TensorBoard
from comet_moe.experiments.training.records import EpochRecord, EvaluationRecord, RoutingRecord


def test_numbers_are_written_by_their_path_and_lists_are_left_out(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    routing = RoutingRecord(
        experts_per_sample=2,
        share_of_samples=[1, 1, 0, 0],
        share_of_weight=[0.5, 0.5, 0, 0],
        effective_experts=2.25,
        information=0.125,
        load_ratio=2,
        dead_experts=[2, 3],
    )
    validation = EvaluationRecord(
        loss=2.5,
        tasks={"digit": {"auc": None}},
        experts_per_sample=2,
        flops_per_sample=1,
        routing={"digit": routing},
    )
    record = EpochRecord(
        epoch=3,
        train_loss=0.5,
        train_aux_loss=0.1,
        permutations=[[0, 1]],
        samples_per_second=9,
        validation=validation,
        best_validation_loss=2.5,
        patience_left=1,
        seconds=4,
    )
    with TensorBoard(tmp_path) as board:
        board.on_epoch(record)
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    names = set(events.Tags()["scalars"])
    assert {"train_loss", "validation/loss", "validation/experts_per_sample"} <= names
    assert not {"epoch", "permutations", "tau", "validation/tasks/digit/auc"} & names
    (event,) = events.Scalars("validation/loss")
    assert (event.step, event.value) == (3, 2.5)
    for name, value in (("information", 0.125), ("effective_experts", 2.25), ("load_ratio", 2)):
        assert events.Scalars(f"validation/routing/digit/{name}")[0].value == value
    assert events.Scalars("validation/routing/digit/dead_experts")[0].value == 2
    assert "validation/routing/digit/share_of_samples" not in names
