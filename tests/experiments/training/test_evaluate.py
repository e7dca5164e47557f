"""Metrics are those of scikit-learn, NaN where they are undefined, and never a warning."""

import math
import warnings

import numpy as np
import pytest
import torch

from comet_moe.experiments.config.schema import steps_per_epoch
from comet_moe.experiments.models import Task
from comet_moe.experiments.training.batches import take_rows, training_batches
from comet_moe.experiments.training.metrics import compute_metrics, table_metrics


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def metrics_of(scores, labels, kind="binary"):
    task = Task("y", kind, 1.0)
    return compute_metrics(table_metrics(task, np.array(scores), np.array(labels), None), len(labels))


def test_auc_counts_ties_as_half():
    assert metrics_of([0.1, 0.5, 0.5, 0.9], [0, 0, 1, 1])["auc"] == 3.5 / 4


@pytest.mark.parametrize(
    ("scores", "labels"),
    [
        ([0.1, 0.2], [1, 1]),
        ([0.1, 0.2], [0, 0]),
        ([], []),
        ([math.nan, 0.2], [0, 1]),
        ([math.inf, 0], [0, 1]),
    ],
)
def test_auc_is_nan_where_it_is_undefined(scores, labels):
    assert math.isnan(metrics_of(scores, labels)["auc"])


def test_accuracy_of_logits():
    assert metrics_of([-1.0, 2.0, 3.0], np.array([0, 1, 0], np.uint8))["accuracy"] == 2 / 3
    assert metrics_of([[1.0, 0.0], [0.0, 1.0]], [0, 0], "multiclass")["accuracy"] == 0.5
    assert math.isnan(metrics_of([], [])["accuracy"])


class Split:
    def __init__(self, rows):
        self.features = {"x": np.arange(rows, dtype=np.float32)}
        self.targets = {"y": np.arange(rows)}

    def __len__(self):
        return len(self.targets["y"])


@pytest.mark.parametrize("rows", [1, 7, 8, 9])
def test_an_epoch_has_every_row_once_in_an_order_of_its_own(rows):
    split = Split(rows)
    epochs = [list(training_batches(split, 4, seed=0, epoch=epoch)) for epoch in (1, 1, 2)]
    orders = [torch.cat([batch.targets["y"] for batch in batches]).tolist() for batches in epochs]
    assert sorted(orders[0]) == list(range(rows))
    assert orders[0] == orders[1]
    assert rows == 1 or orders[0] != orders[2]
    assert len(epochs[0]) == steps_per_epoch(rows, 4)


def test_processes_share_each_batch():
    split = Split(9)
    whole = training_batches(split, 4, 0, 1)
    shards = [training_batches(split, 4, 0, 1, slice(rank, None, 2)) for rank in (0, 1)]
    for batch, *parts in zip(whole, *shards, strict=True):
        rows = torch.cat([part.targets["y"] for part in parts]).tolist()
        assert sorted(rows) == sorted(batch.targets["y"].tolist())


def test_features_that_are_multiplied_lie_in_aligned_memory():
    for start in range(20):
        assert take_rows(Split(50), slice(start, start + 3)).features["x"].data_ptr() % 64 == 0
