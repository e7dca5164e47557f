import errno
import hashlib
import http.server
import os
import threading
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from raw_files import some_ratings, write_ml100k

from comet_moe.data import DATASETS, load, prepare
from comet_moe.data.download import RemoteFile, download_files
from comet_moe.data.io import RequiredFile, find_files, wrap_read_errors
from comet_moe.exceptions import DataError

NAME = "movielens-100k"


@pytest.fixture
def served(tmp_path):
    """A folder and the address it is served under, on this machine."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def zipped_ratings(folder):
    write_ml100k(folder, some_ratings())
    with zipfile.ZipFile(folder / "ml-100k.zip", "w") as archive:
        archive.write(folder / "u.data", "ml-100k/u.data")
    return hashlib.sha256((folder / "ml-100k.zip").read_bytes()).hexdigest()


def test_every_name_of_the_house_is_there_with_terms_and_files():
    assert list(DATASETS) == [
        *("multidigits", "movielens", "movielens-200k", "movielens-100k", "jester", "books", "digits"),
        *("multimnist", "multifashionmnist", "celeba", "ratings"),
    ]
    for source in DATASETS.values():
        assert source.licence.endswith(".")
        assert all(len(remote.sha256) == 64 for remote in source.downloads)


def test_a_published_archive_is_fetched_checked_unpacked_and_prepared(served, tmp_path, monkeypatch):
    folder, address = served
    remote = RemoteFile(address + "ml-100k.zip", zipped_ratings(folder), member="ml-100k/u.data")
    monkeypatch.setitem(DATASETS, NAME, replace(DATASETS[NAME], downloads=(remote,)))
    dataset = prepare(NAME, source=None, cache=tmp_path / "c", strict=False)
    assert dataset.meta["sources"][0]["file"] == "u.data"
    assert prepare(NAME, source=None, cache=tmp_path / "c", strict=False).folder == dataset.folder


def test_a_wrong_checksum_is_an_error_that_leaves_no_file(served, tmp_path):
    folder, address = served
    zipped_ratings(folder)
    with pytest.raises(DataError, match=r"ml-100k\.zip could not be downloaded .*: do this"):
        download_files([RemoteFile(address + "ml-100k.zip", "0" * 64)], tmp_path / "into", "do this.")
    assert list((tmp_path / "into").iterdir()) == []


def test_no_network_is_an_error_that_says_what_to_put_where(tmp_path, monkeypatch):
    nobody = RemoteFile("http://127.0.0.1:9/ml-100k.zip", "0" * 64)
    monkeypatch.setitem(DATASETS, NAME, replace(DATASETS[NAME], downloads=(nobody,)))
    with pytest.raises(
        DataError, match=r"could not be downloaded .*put u\.data .*prepare movielens-100k --from DIR"
    ):
        prepare(NAME, source=None, cache=tmp_path)


@pytest.mark.parametrize(
    ("name", "split", "file"),
    [("celeba", "random", "list_attr_celeba.txt"), ("movielens", "authors", "comet_split_val.parquet")],
)
def test_what_cannot_be_fetched_says_what_to_put_where(tmp_path, name, split, file):
    with pytest.raises(
        DataError, match=rf"cannot be downloaded for you: put .*{file}.*prepare {name} --from DIR"
    ):
        prepare(name, source=None, cache=tmp_path, split=split)


def test_unknown_names_splits_options_and_seeds_are_errors_that_list_the_known(tmp_path):
    with pytest.raises(DataError, match="no data set 'movielens-2m'; there are multidigits, movielens"):
        load("movielens-2m", cache=tmp_path)
    with pytest.raises(DataError, match="no split 'authors'; its splits are: random"):
        load("jester", cache=tmp_path, split="authors")
    with pytest.raises(DataError, match="no option colour; its options are: attributes, size"):
        load("celeba", cache=tmp_path, colour=True)
    with pytest.raises(DataError, match="the seed is -1"):
        load("celeba", cache=tmp_path, seed=-1)
    with pytest.raises(DataError, match="needs a table of yours"):
        load("ratings", cache=tmp_path)


def test_files_are_found_in_the_folder_first_then_below(tmp_path):
    needs = (RequiredFile("a", ("a.txt", "a.dat")),)
    (tmp_path / "x" / "y").mkdir(parents=True)
    with pytest.raises(DataError, match=r"has no a\.txt or a\.dat"):
        find_files(tmp_path, needs, "random")
    (tmp_path / "x" / "y" / "a.txt").touch()
    assert find_files(tmp_path, needs, "random") == {"a": tmp_path / "x" / "y" / "a.txt"}
    (tmp_path / "a.dat").touch()
    assert find_files(tmp_path, needs, "random") == {"a": tmp_path / "a.dat"}
    assert find_files(tmp_path / "a.dat", needs, "random") == {"a": tmp_path / "a.dat"}
    (tmp_path / "other").touch()
    with pytest.raises(DataError, match=r"other is not a\.txt or a\.dat"):
        find_files(tmp_path / "other", needs, "random")


def test_a_name_that_is_there_twice_is_an_error(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").touch()
    with pytest.raises(DataError, match="could both be meant"):
        find_files(tmp_path, (RequiredFile("a", ("a.txt",)),), "random")


def test_a_source_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        prepare(NAME, source=tmp_path / "nowhere", cache=tmp_path)


def test_a_refused_reading_is_an_error_that_names_the_file():
    with (
        pytest.raises(DataError, match=r"x\.csv cannot be opened \(Permission denied\)"),
        wrap_read_errors(Path("x.csv"), "table"),
    ):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_file_without_permission_is_an_error_that_names_it(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("the superuser may read every file")
    write_ml100k(tmp_path, some_ratings())
    (tmp_path / "u.data").chmod(0)
    with pytest.raises(DataError, match=r"u\.data cannot be opened \(Permission denied\)"):
        prepare(NAME, source=tmp_path, cache=tmp_path / "c")
