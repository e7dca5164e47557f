from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from raw_files import some_ratings, write_ml100k

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import cache, load, prepare

NAME = "movielens-100k"


def test_an_interruption_before_the_rename_leaves_no_file(raw, store, monkeypatch):
    monkeypatch.setattr(cache, "_replace", lambda temporary, folder: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(NAME, source=raw, cache=store, strict=False)
    assert list(store.iterdir()) == []
    monkeypatch.undo()
    assert len(prepare(NAME, source=raw, cache=store, strict=False).train)


def test_a_failed_write_is_an_error_that_names_the_folder_and_leaves_no_file(raw, store):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # bytes of the largest file
    try:
        with pytest.raises(DataError, match=r"cache cannot be written \(File too large\)"):
            prepare(NAME, source=raw, cache=store, strict=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(store.iterdir()) == []


def test_a_cache_folder_that_is_a_file_is_an_error(raw, store):
    store.write_text("in the way")
    with pytest.raises(DataError, match="cache cannot be written"):
        prepare(NAME, source=raw, cache=store, strict=False)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("train.features.item.npy", truncate),
        ("train.features.item.npy", Path.unlink),
        ("user.vocabulary.json", truncate),
        ("meta.json", truncate),
        ("meta.json", lambda path: path.write_text("")),
        ("meta.json", Path.unlink),
        ("meta.json", lambda path: path.write_text(path.read_text().replace('"format": 1', '"format": 0'))),
        ("test.targets.rating.npy", lambda path: path.write_bytes(b"\0" * path.stat().st_size)),
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
