"""The metrics of tables are those of scikit-learn, and their intervals cover what they should."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.experiments.models import Task
from comet_moe.experiments.training.metrics import (
    bootstrap_intervals,
    compute_metrics,
    table_metrics,
    weighted_auc,
)
from sklearn import metrics as sk


def compute(task, outputs, targets, groups=None):
    return compute_metrics(table_metrics(task, outputs, targets, groups), len(targets))


def binary(rows=300, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=rows).round(1)  # with ties
    return logits, (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(float)


def test_two_classes():
    logits, labels = binary()
    probability = 1 / (1 + np.exp(-logits))
    found = compute(Task("y", "binary", 1.0), logits, labels)
    assert found["auc"] == pytest.approx(sk.roc_auc_score(labels, logits))
    assert found["log_loss"] == pytest.approx(sk.log_loss(labels, probability))
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(labels, probability > 0.5))
    assert found["f1"] == pytest.approx(sk.f1_score(labels, probability > 0.5))


def test_several_classes():
    rng = np.random.default_rng(0)
    outputs, labels = rng.normal(size=(300, 4)), rng.integers(0, 4, 300)
    found = compute(Task("y", "multiclass", 1.0, outputs=4), outputs, labels)
    shares = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    assert found["log_loss"] == pytest.approx(sk.log_loss(labels, shares))
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(labels, outputs.argmax(1)))
    assert found["f1"] == pytest.approx(sk.f1_score(labels, outputs.argmax(1), average="macro"))


def test_the_log_loss_of_a_sure_mistake_is_that_of_its_logit():
    found = compute(Task("y", "binary", 1.0), np.array([60.0, -800.0]), np.array([0.0, 1.0]))
    assert found["log_loss"] == pytest.approx(430.0)
    outputs = np.array([[0.0, 900.0, 0.0]])
    found = compute(Task("y", "multiclass", 1.0, outputs=3), outputs, np.array([2]))
    assert found["log_loss"] == pytest.approx(900.0)


def test_numbers_are_in_the_units_of_the_data():
    rng = np.random.default_rng(0)
    outputs, targets = rng.normal(size=300), rng.normal(size=300)
    found = compute(Task("y", "regression", 1.0, mean=50.0, std=10.0), outputs, targets)
    predicted, actual = outputs * 10 + 50, targets * 10 + 50
    assert found["mse"] == pytest.approx(sk.mean_squared_error(actual, predicted))
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(actual, predicted))
    assert found["r2"] == pytest.approx(sk.r2_score(actual, predicted))
    counts = rng.poisson(3, 300)
    assert compute(Task("y", "count", 1.0), np.log(counts + 1.0), counts)["mae"] == pytest.approx(1.0)


def test_calibration_error_is_the_gap_between_probability_and_share():
    labels = np.repeat([1.0, 0.0], [30, 70])
    confident = np.full(100, 0.5)  # sigmoid 0.62, of which 0.3 come true
    found = compute(Task("y", "binary", 1.0), confident, labels)
    assert found["calibration_error"] == pytest.approx(1 / (1 + np.exp(-0.5)) - 0.3)


@given(st.integers(0, 1000), st.integers(1, 6))
def test_the_grouped_auc_is_the_mean_over_groups_weighted_by_their_rows(seed, groups):
    logits, labels = binary(60, seed)
    group = np.random.default_rng(seed).integers(0, groups, 60) * 1000 - 7
    own = [(labels[group == g], logits[group == g]) for g in np.unique(group)]
    own = [(y, s) for y, s in own if 0 < y.mean() < 1]
    sizes = [len(y) for y, _ in own]
    expected = np.average([sk.roc_auc_score(y, s) for y, s in own], weights=sizes) if own else np.nan
    found = weighted_auc(logits, labels, group)(np.ones(60))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@given(st.integers(0, 1000))
def test_weights_are_repeated_rows(seed):
    logits, labels = binary(50, seed)
    weights = np.random.default_rng(seed).integers(0, 4, 50)
    repeated = np.repeat(np.arange(50), weights)
    for task in (Task("y", "binary", 1.0), Task("y", "regression", 1.0)):
        own = table_metrics(task, logits, labels, None)
        others = table_metrics(task, logits[repeated], labels[repeated], None)
        for name in own:
            expected = others[name](np.ones(len(repeated)))
            np.testing.assert_allclose(own[name](weights.astype(float)), expected, rtol=1e-9)


def test_an_undefined_metric_is_nan_and_has_no_interval():
    found = table_metrics(Task("y", "binary", 1.0), np.zeros(5), np.ones(5), None)
    assert np.isnan(compute_metrics(found, 5)["auc"])
    assert bootstrap_intervals(found, 5)["auc"] == [None, None]
    nothing = table_metrics(Task("y", "binary", 1.0), np.zeros(0), np.zeros(0), None)
    assert all(np.isnan(value) or name == "f1" for name, value in compute_metrics(nothing, 0).items())


def test_intervals_hold_the_metric_shrink_with_rows_and_repeat():
    widths = []
    for rows in (200, 3200):
        logits, labels = binary(rows)
        metrics = table_metrics(Task("y", "binary", 1.0), logits, labels, None)
        intervals = bootstrap_intervals(metrics, rows)
        assert intervals == bootstrap_intervals(metrics, rows)
        for name, value in compute_metrics(metrics, rows).items():
            low, high = intervals[name]
            assert low < value < high or name == "calibration_error"  # which is biased upwards
        widths.append(intervals["auc"][1] - intervals["auc"][0])
    assert 3 < widths[0] / widths[1] < 5.5  # about √16
