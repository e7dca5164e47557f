import os
import sys

import numpy as np
import pytest
from raw_files import some_ratings, write_ml100k

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import default_cache, list_prepared, load, prepare

NAME = "movielens-100k"


def test_a_prepared_data_set_loads_as_memory_maps_without_its_source(raw, store):
    first = prepare(NAME, source=raw, cache=store, strict=False)
    (raw / "u.data").unlink()
    second = load(NAME, cache=store)
    assert np.array_equal(first.train.features["item"], second.train.features["item"])
    assert isinstance(second.train.features["item"].base, np.memmap)


def test_the_same_files_are_built_once_and_changed_files_again(raw, store, monkeypatch):
    built = []
    module = sys.modules[prepare.__module__]
    write = module.write_dataset
    monkeypatch.setattr(module, "write_dataset", lambda *given: (built.append(given[0]), write(*given)))
    for _ in range(2):
        prepare(NAME, source=raw, cache=store, strict=False)
    assert len(built) == 1
    write_ml100k(raw, some_ratings(users=50))
    assert prepare(NAME, source=raw, cache=store, strict=False).meta["num_users"] == 50
    assert len(built) == 2


def test_files_of_unofficial_size_are_checked_again_when_strict(raw, store):
    prepare(NAME, source=raw, cache=store, strict=False)
    with pytest.raises(DataError, match="--any-size"):
        prepare(NAME, source=raw, cache=store, strict=True)


def test_another_seed_is_prepared_from_the_same_files(raw, store):
    first = prepare(NAME, source=raw, cache=store, strict=False)
    second = load(NAME, cache=store, seed=7)
    assert second.meta["seed"] == 7
    assert not np.array_equal(first.test.features["user"], second.test.features["user"])


def test_the_meta_data_has_size_and_sha256_of_each_source(raw, store):
    (source,) = prepare(NAME, source=raw, cache=store, strict=False).meta["sources"]
    assert source["file"] == "u.data"
    assert source["bytes"] == (raw / "u.data").stat().st_size
    assert len(source["sha256"]) == 64


def test_loading_an_unprepared_data_set_is_an_error_with_files_and_command(store):
    with pytest.raises(
        DataError,
        match=r"run `comet-moe data prepare movielens-100k`, which downloads it, or put "
        r"u\.data or u_data\.parquet .*`comet-moe data prepare movielens-100k --from DIR`",
    ):
        load(NAME, cache=store)


@pytest.mark.parametrize(("name", "split"), [("books", "random"), ("movielens", "authors")])
def test_no_download_is_offered_for_files_that_the_user_must_get(store, name, split):
    with pytest.raises(DataError, match=r"is not in .*: put .*--from DIR`") as raised:
        load(name, cache=store, split=split)
    assert "downloads it" not in str(raised.value)


def test_a_file_without_read_permission_is_an_error_that_names_it(raw, store):
    if os.geteuid() == 0:
        pytest.skip("the superuser may read every file")
    (raw / "u.data").chmod(0)
    with pytest.raises(DataError, match=r"u\.data cannot be opened \(Permission denied\)"):
        prepare(NAME, source=raw, cache=store)


def test_prepared_data_sets_are_listed_by_name_without_damaged_ones(raw, store):
    assert list_prepared(store) == {}
    folders = [prepare(NAME, source=raw, cache=store, seed=seed, strict=False).folder for seed in range(3)]
    (folders[1] / "meta.json").unlink()
    assert list_prepared(store) == {NAME: [folders[0], folders[2]]}


def test_the_default_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("COMET_MOE_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
    monkeypatch.delenv("COMET_MOE_CACHE")
    assert default_cache().name == "comet-moe"
