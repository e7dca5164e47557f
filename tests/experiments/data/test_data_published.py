"""Exact counts on the publishers' data, where it is available."""

import os
from pathlib import Path

import numpy as np
import pytest

from comet_moe.experiments.data import prepare

SHARED = Path(os.environ.get("COMET_MOE_SHARED", Path(__file__).parents[4] / "shared" / "data"))


def prepare_published(name, folder, tmp_path, **options):
    source = SHARED / folder
    if not source.is_dir():
        pytest.skip(f"{source} does not exist; set COMET_MOE_SHARED to the folder of the published data")
    return prepare(name, source=source, cache=tmp_path, **options)


def count_rows(dataset):
    return [len(part) for part in (dataset.train, dataset.validation, dataset.test)]


def count_watched(dataset):
    return [int(part.targets["watched"].sum()) for part in (dataset.train, dataset.validation, dataset.test)]


@pytest.mark.parametrize("split", ["random", "authors"])
def test_movielens_has_the_rows_of_the_paper(tmp_path, split):
    dataset = prepare_published("movielens", "movielens-1m", tmp_path, split=split)
    assert count_rows(dataset) == [1_574_602, 224_944, 199_950]
    assert sum(count_watched(dataset)) == 1_000_209
    assert (dataset.meta["num_users"], dataset.meta["num_items"]) == (6040, 3706)
    pairs = np.concatenate(
        [
            p.features["user"].astype(np.int64) * 3706 + p.features["item"]
            for p in (dataset.train, dataset.validation, dataset.test)
        ]
    )
    pairs.sort()
    assert (pairs[1:] != pairs[:-1]).all()
    assert sum(dataset.meta["files"].values()) < 200e6
    if split == "authors":
        assert count_watched(dataset) == [787_664, 112_524, 100_021]


def test_movielens_200k_has_the_rows_of_table_1(tmp_path):
    dataset = prepare_published("movielens-200k", "movielens-1m", tmp_path, split="authors")
    assert count_rows(dataset) == [209_946, 14_996, 13_330]
    assert count_watched(dataset)[0] == 104_973
    assert dataset.meta["num_users"] == 1501


def test_movielens_100k_has_all_published_ratings(tmp_path):
    dataset = prepare_published("movielens-100k", "movielens-100k", tmp_path)
    assert (dataset.meta["num_users"], dataset.meta["num_items"]) == (943, 1682)
    assert sum(count_watched(dataset)) == 100_000
    assert count_rows(dataset) == [157_500, 22_500, 20_000]


def test_jester_part_1_has_all_published_ratings(tmp_path):
    dataset = prepare_published("jester", "jester", tmp_path)
    assert sum(count_watched(dataset)) == 1_810_455
    assert count_rows(dataset) == [1_748_810, 374_745, 374_745]


def test_the_subset_of_books_has_no_rare_users_and_books(tmp_path):
    dataset = prepare_published("books", "book-crossing", tmp_path)
    assert sum(count_rows(dataset)) == 61_819
    for feature in ("user", "item"):
        parts = (dataset.train, dataset.validation, dataset.test)
        counts = np.bincount(np.concatenate([part.features[feature] for part in parts]))
        assert counts.min() >= 5


@pytest.mark.parametrize(
    ("name", "folder"), [("multimnist", "mnist"), ("multifashionmnist", "fashion-mnist")]
)
def test_overlays_have_the_sizes_of_the_paper(tmp_path, name, folder):
    dataset = prepare_published(name, folder, tmp_path)
    assert dataset.train.features["image"].shape == (100_000, 1, 36, 36)
    assert count_rows(dataset)[1:] == [20_000, 20_000]
    assert np.bincount(dataset.train.targets["top_left"], minlength=10).min() > 8_000


def test_celeba_has_ten_balanced_tasks(tmp_path):
    dataset = prepare_published("celeba", "celeba", tmp_path)
    assert dataset.train.features["image"].shape == (8_000, 3, 109, 89)
    assert count_rows(dataset)[1:] == [1_000, 1_000]
    shares = [target.mean() for target in dataset.train.targets.values()]
    assert len(shares) == 10
    assert all(0.25 < share < 0.75 for share in shares)
