"""The records of a run are written and read back as the same values."""

import math
import subprocess
import sys

import pytest
from pydantic import ValidationError

from comet_moe.experiments.training.records import EpochRecord, EvaluationRecord, ResultRecord, RoutingRecord

ROUTING = RoutingRecord(
    experts_per_sample=1.5,
    share_of_samples=[1.0, 0.5, 0.0],
    share_of_weight=[0.7, 0.3, 0.0],
    effective_experts=1.84,
    information=0.3,
    load_ratio=2.0,
    dead_experts=[2],
)
VALIDATION = EvaluationRecord(
    loss=41.0,
    tasks={"watched": {"loss": 0.41, "auc": math.nan}},
    experts_per_sample=1.5,
    flops_per_sample=1e6,
    routing={"watched": ROUTING},
)


def test_an_epoch_is_read_back_as_it_was_written_and_nan_as_none():
    record = EpochRecord(
        epoch=1,
        train_loss=math.inf,
        train_aux_loss=0.1,
        permutations=[[1, 0, 2], [[0, 1, 2], [2, 1, 0]]],
        soft_permutations=[[[0.5, 0.5], [0.5, 0.5]]],
        samples_per_second=10.0,
        validation=VALIDATION,
        best_validation_loss=41.0,
        patience_left=3,
        seconds=1.0,
    )
    read = EpochRecord.model_validate_json(record.model_dump_json())
    assert read.train_loss is None
    assert read.validation.tasks["watched"] == {"loss": 0.41, "auc": None}
    changed = {"train_loss", "validation"}
    assert read.model_dump(exclude=changed) == record.model_dump(exclude=changed)
    assert read.validation.routing == {"watched": ROUTING}


def test_a_field_that_no_reader_knows_cannot_be_written():
    with pytest.raises(ValidationError, match="usage"):
        ResultRecord(status="complete", usage={})


def test_reading_records_needs_no_torch():
    code = "import comet_moe.experiments.training.records, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
