import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from raw_files import some_ratings, write_ml100k

from comet_moe import data
from comet_moe.data import cache, load, loading, prepare
from comet_moe.exceptions import DataError

NAME = "movielens-100k"


@pytest.fixture
def raw(tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    return write_ml100k(folder, some_ratings())


@pytest.fixture
def store(tmp_path):
    return tmp_path / "cache"


def test_what_is_prepared_opens_without_its_source(raw, store):
    first = prepare(NAME, source=raw, cache=store, strict=False)
    (raw / "u.data").unlink()
    second = load(NAME, cache=store)
    assert np.array_equal(first.train.features["item"], second.train.features["item"])
    assert isinstance(second.train.features["item"].base, np.memmap)


def test_preparing_twice_builds_once_and_another_source_builds_again(raw, store, monkeypatch):
    built = []
    write = loading.write_dataset
    monkeypatch.setattr(loading, "write_dataset", lambda *given: (built.append(given[0]), write(*given)))
    for _ in range(2):
        prepare(NAME, source=raw, cache=store, strict=False)
    assert len(built) == 1
    write_ml100k(raw, some_ratings(users=50))
    assert prepare(NAME, source=raw, cache=store, strict=False).meta["num_users"] == 50
    assert len(built) == 2


def test_a_loose_preparation_does_not_pass_for_a_strict_one(raw, store):
    prepare(NAME, source=raw, cache=store, strict=False)
    with pytest.raises(DataError, match="--any-size"):
        prepare(NAME, source=raw, cache=store, strict=True)


def test_another_seed_is_prepared_from_where_the_first_came_from(raw, store):
    first = prepare(NAME, source=raw, cache=store, strict=False)
    second = load(NAME, cache=store, seed=7)
    assert second.meta["seed"] == 7
    assert not np.array_equal(first.test.features["user"], second.test.features["user"])


def test_sources_are_recorded_with_size_and_checksum(raw, store):
    (source,) = prepare(NAME, source=raw, cache=store, strict=False).meta["sources"]
    assert source["file"] == "u.data"
    assert source["bytes"] == (raw / "u.data").stat().st_size
    assert len(source["sha256"]) == 64


def test_what_is_not_prepared_is_an_error_with_files_and_command(store):
    with pytest.raises(
        DataError, match=r"u\.data or u_data\.parquet .*`comet-moe data prepare movielens-100k --from DIR`"
    ):
        load(NAME, cache=store)


def test_a_failure_before_the_rename_leaves_nothing(raw, store, monkeypatch):
    monkeypatch.setattr(cache, "_replace", lambda aside, folder: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(NAME, source=raw, cache=store, strict=False)
    assert list(store.iterdir()) == []
    monkeypatch.undo()
    assert len(prepare(NAME, source=raw, cache=store, strict=False).train)


def test_a_full_disk_is_an_error_that_names_the_folder_and_leaves_nothing(raw, store, monkeypatch):
    saved = []

    def save(stream, array, **_):
        if len(saved) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        saved.append(array)

    monkeypatch.setattr(np, "save", save)
    with pytest.raises(DataError, match=r"cache cannot be written \(No space left on device\)"):
        prepare(NAME, source=raw, cache=store, strict=False)
    assert list(store.iterdir()) == []


def test_a_really_full_disk_is_an_error():
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    blocks = data.types.BlockwiseArray(
        (4, 100_000), np.dtype(np.uint8), lambda: iter([np.zeros((4, 100_000), np.uint8)])
    )
    with pytest.raises(OSError, match="No space left"):
        cache._save_array(Path("/dev/full"), blocks)


def test_a_cache_that_is_a_file_is_an_error(raw, store):
    store.write_text("in the way")
    with pytest.raises(DataError, match="cache cannot be written"):
        prepare(NAME, source=raw, cache=store, strict=False)


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("train.item.npy", cut),
        ("train.item.npy", Path.unlink),
        ("user.vocabulary.json", cut),
        ("meta.json", cut),
        ("meta.json", lambda path: path.write_text("")),
        ("meta.json", Path.unlink),
        ("meta.json", lambda path: path.write_text(path.read_text().replace('"format": 1', '"format": 0'))),
        ("test.rating.npy", lambda path: path.write_bytes(b"\0" * path.stat().st_size)),
    ],
)
def test_a_damaged_folder_is_reported_by_load_and_rebuilt_by_prepare(raw, store, file, damage):
    before = prepare(NAME, source=raw, cache=store, strict=False)
    expected = before.train.features["item"].tolist()
    damage(before.folder / file)
    with pytest.raises(DataError, match=r"delete .*movielens-100k-random-0|prepare the data set again"):
        load(NAME, cache=store)
    assert prepare(NAME, source=raw, cache=store, strict=False).train.features["item"].tolist() == expected
    assert len(load(NAME, cache=store).train)


def test_arrays_that_are_open_survive_a_rebuild(raw, store):
    first = prepare(NAME, source=raw, cache=store, strict=False)
    expected = first.train.features["user"].tolist()
    write_ml100k(raw, some_ratings(users=50))
    prepare(NAME, source=raw, cache=store, strict=False)
    assert first.train.features["user"].tolist() == expected


def test_processes_that_prepare_at_the_same_time_all_succeed(raw, store):
    results = []
    run = lambda: results.append(len(prepare(NAME, source=raw, cache=store, strict=False).train))  # noqa: E731
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert [path.name for path in store.iterdir()] == ["movielens-100k-random-0"]


def test_default_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("COMET_MOE_CACHE", str(tmp_path))
    assert data.default_cache() == tmp_path
    monkeypatch.delenv("COMET_MOE_CACHE")
    assert data.default_cache().name == "comet-moe"
