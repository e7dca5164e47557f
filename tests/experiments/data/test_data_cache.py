import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from raw_files import some_ratings, write_ml100k

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import cache, load, prepare
from comet_moe.experiments.data.types import BlockwiseArray

NAME = "movielens-100k"


def test_an_interruption_before_the_rename_leaves_no_file(raw, store, monkeypatch):
    monkeypatch.setattr(cache, "_replace", lambda temporary, folder: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(NAME, source=raw, cache=store, strict=False)
    assert list(store.iterdir()) == []
    monkeypatch.undo()
    assert len(prepare(NAME, source=raw, cache=store, strict=False).train)


def test_a_full_disk_is_an_error_that_names_the_folder_and_leaves_no_file(raw, store, monkeypatch):
    saved = []

    def save(file, array, **_):
        if len(saved) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        saved.append(array)

    monkeypatch.setattr(np, "save", save)
    with pytest.raises(DataError, match=r"cache cannot be written \(No space left on device\)"):
        prepare(NAME, source=raw, cache=store, strict=False)
    assert list(store.iterdir()) == []


def test_a_full_device_raises_while_blocks_are_written():
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    blocks = BlockwiseArray(
        (4, 100_000), np.dtype(np.uint8), lambda: iter([np.zeros((4, 100_000), np.uint8)])
    )
    with pytest.raises(OSError, match="No space left"):
        cache._save_array(Path("/dev/full"), blocks)


def test_a_cache_folder_that_is_a_file_is_an_error(raw, store):
    store.write_text("in the way")
    with pytest.raises(DataError, match="cache cannot be written"):
        prepare(NAME, source=raw, cache=store, strict=False)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("train.item.npy", truncate),
        ("train.item.npy", Path.unlink),
        ("user.vocabulary.json", truncate),
        ("meta.json", truncate),
        ("meta.json", lambda path: path.write_text("")),
        ("meta.json", Path.unlink),
        ("meta.json", lambda path: path.write_text(path.read_text().replace('"format": 1', '"format": 0'))),
        ("test.rating.npy", lambda path: path.write_bytes(b"\0" * path.stat().st_size)),
    ],
)
def test_a_damaged_folder_is_an_error_of_load_and_built_again_by_prepare(raw, store, file, damage):
    before = prepare(NAME, source=raw, cache=store, strict=False)
    expected = before.train.features["item"].tolist()
    damage(before.folder / file)
    with pytest.raises(DataError, match=r"delete .*movielens-100k-random-0|prepare the data set again"):
        load(NAME, cache=store)
    assert prepare(NAME, source=raw, cache=store, strict=False).train.features["item"].tolist() == expected
    assert len(load(NAME, cache=store).train)


def test_open_arrays_stay_valid_when_the_data_set_is_built_again(raw, store):
    first = prepare(NAME, source=raw, cache=store, strict=False)
    expected = first.train.features["user"].tolist()
    write_ml100k(raw, some_ratings(users=50))
    prepare(NAME, source=raw, cache=store, strict=False)
    assert first.train.features["user"].tolist() == expected


def test_threads_that_prepare_the_same_data_set_at_once_all_succeed(raw, store):
    with ThreadPoolExecutor(4) as pool:
        started = [pool.submit(prepare, NAME, source=raw, cache=store, strict=False) for _ in range(4)]
    assert len({len(future.result().train) for future in started}) == 1
    assert [path.name for path in store.iterdir()] == ["movielens-100k-random-0"]
