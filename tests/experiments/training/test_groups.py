"""What experts specialise in: groupings of rows by a column, and the statistics of a gate by group."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from comet_moe.exceptions import DataError
from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.data import Split, load
from comet_moe.experiments.models.build import build_model
from comet_moe.experiments.training.evaluate import evaluate, evaluate_held_out
from comet_moe.experiments.training.groups import MAX_GROUPS, Grouping
from comet_moe.experiments.training.records import GroupsRecord

SIZES = {"train_size": 64, "validation_size": 50, "test_size": 90}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    loaded = load("multidigits", cache=tmp_path_factory.mktemp("cache"), **SIZES)
    return replace(loaded, meta={**loaded.meta, "groups": {}})


@pytest.fixture(scope="module")
def model(dataset):
    return build_model(load_train_config("multidigits", ["gate=topk"]), dataset.meta)


def split_of(column, **others):
    return Split({"x": np.zeros((len(column), 2))}, {"kind": np.array(column), **others})


def test_values_are_their_own_labels_unless_they_have_others():
    split = split_of([3, 0, 3, 1])
    assert Grouping("kind", split).labels == ["0", "1", "3"]
    assert Grouping("kind", split, ["plain", "mirrored"]).labels == ["plain", "mirrored", "3"]
    assert Grouping("kind", split).groups.tolist() == [2, 0, 2, 1]
    assert Grouping("kind", split_of(["b", "a"])).labels == ["a", "b"]
    assert Grouping("kind", split_of([0.5, 2.0])).labels == ["0.5", "2"]


def test_the_largest_groups_are_kept_and_the_others_are_one():
    column = [value for value in range(MAX_GROUPS + 5) for _ in range(1 + value)]
    grouping = Grouping("kind", split_of(column))
    assert grouping.labels == [*map(str, range(5, MAX_GROUPS + 5)), "other"]
    assert [grouping.labels[group] for group in grouping.groups] == [
        "other" if value < 5 else str(value) for value in column
    ]


@pytest.mark.parametrize("name", ["domain", "x"])
def test_a_group_that_is_no_column_of_single_values_is_named(name):
    with pytest.raises(DataError, match=rf"by '{name}', which is none .* single values: kind, other\."):
        Grouping(name, split_of([0, 1], other=np.zeros(2)))


def test_the_test_split_is_grouped_by_class_and_the_validation_split_is_not(dataset, model):
    summary = evaluate_held_out(model, dataset)
    for task, record in summary.routing.items():
        assert list(record.groups) == [task]
        groups = record.groups[task]
        target = dataset.test.targets[task]
        assert groups.labels == [str(value) for value in np.unique(target)]
        assert groups.samples == np.unique(target, return_counts=True)[1].tolist()
        mean = np.average(groups.shares, axis=0, weights=groups.samples)
        np.testing.assert_allclose(mean, record.share_of_weight, rtol=1e-5, atol=1e-7)  # float32 weights
    assert all(not record.groups for record in evaluate(model, dataset.validation).routing.values())


def test_batches_do_not_change_the_shares_of_groups(dataset, model, monkeypatch):
    whole = evaluate(model, dataset.test, {}).routing
    monkeypatch.setattr("comet_moe.experiments.training.evaluate.EVALUATION_BATCH", 32)
    for task, record in evaluate(model, dataset.test, {}).routing.items():
        np.testing.assert_allclose(
            record.groups[task].shares, whole[task].groups[task].shares, rtol=1e-4, atol=1e-6
        )  # products of other sizes round differently in float32


def test_every_gate_is_grouped_by_the_columns_that_the_data_set_names(dataset, model):
    kind = np.arange(len(dataset.test)) % 2
    test = Split(dataset.test.features, {**dataset.test.targets, "kind": kind})
    named = replace(dataset, test=test, meta={**dataset.meta, "groups": {"kind": ["plain", "mirrored"]}})
    for task, record in evaluate_held_out(model, named).routing.items():
        assert list(record.groups) == [task, "kind"]
        assert record.groups["kind"].labels == ["plain", "mirrored"]
        assert record.groups["kind"].samples == [45, 45]


def test_lift_is_the_share_in_a_group_divided_by_the_share_in_all():
    groups = GroupsRecord(labels=["a", "b"], samples=[30, 10], shares=[[0.5, 0.5, 0.0], [0.1, 0.9, 0.0]])
    # P(expert) = (30 * 0.5 + 10 * 0.1) / 40 = 0.4 and 0.6
    assert groups.lift() == [
        [pytest.approx(1.25), pytest.approx(0.5 / 0.6), None],
        [pytest.approx(0.25), pytest.approx(1.5), None],
    ]
    assert torch.tensor(groups.shares).sum(1).tolist() == [1.0, 1.0]
