import hashlib
import http.server
import threading
import zipfile
from dataclasses import replace
from functools import partial

import pytest
from raw_files import some_ratings, write_ml100k

from comet_moe.exceptions import DataError
from comet_moe.experiments.data import DATASETS, prepare
from comet_moe.experiments.data.registry import RemoteFile, download_files

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


def zip_ratings(folder):
    """Write an archive of ratings; its sha256."""
    write_ml100k(folder, some_ratings())
    with zipfile.ZipFile(folder / "ml-100k.zip", "w") as archive:
        archive.write(folder / "u.data", "ml-100k/u.data")
    return hashlib.sha256((folder / "ml-100k.zip").read_bytes()).hexdigest()


def test_a_published_archive_is_downloaded_unpacked_and_prepared(served, tmp_path, monkeypatch):
    folder, address = served
    remote = RemoteFile(address + "ml-100k.zip", zip_ratings(folder), member="ml-100k/u.data")
    monkeypatch.setitem(DATASETS, NAME, replace(DATASETS[NAME], downloads=(remote,)))
    dataset = prepare(NAME, source=None, cache=tmp_path / "c", strict=False)
    assert dataset.meta["sources"][0]["file"] == "u.data"
    assert prepare(NAME, source=None, cache=tmp_path / "c", strict=False).folder == dataset.folder


@pytest.mark.parametrize("name", ["../outside", "ml-100k/../../outside", "/{root}/outside", "..\\outside"])
def test_an_archive_writes_nothing_but_its_member(served, tmp_path, name):
    folder, address = served
    zip_ratings(folder)
    with zipfile.ZipFile(folder / "ml-100k.zip", "a") as archive:
        archive.writestr(name.format(root=tmp_path), "from the archive")
    sha256 = hashlib.sha256((folder / "ml-100k.zip").read_bytes()).hexdigest()
    remote = RemoteFile(address + "ml-100k.zip", sha256, member="ml-100k/u.data")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    into = download_files([remote], tmp_path / "into", "do this.")
    written = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert written == {into / "ml-100k.zip", into / "ml-100k" / "u.data"}


def test_a_file_with_its_sha256_is_not_downloaded_again(served, tmp_path):
    folder, address = served
    remote = RemoteFile(address + "ml-100k.zip", zip_ratings(folder))
    download_files([remote], tmp_path / "into", "do this.")
    (folder / "ml-100k.zip").unlink()
    assert download_files([remote], tmp_path / "into", "do this.") == tmp_path / "into"


def test_a_wrong_sha256_is_an_error_that_leaves_no_file(served, tmp_path):
    folder, address = served
    zip_ratings(folder)
    with pytest.raises(DataError, match=r"ml-100k\.zip could not be downloaded .*: do this"):
        download_files([RemoteFile(address + "ml-100k.zip", "0" * 64)], tmp_path / "into", "do this.")
    assert list((tmp_path / "into").iterdir()) == []


def test_without_a_network_the_error_says_which_files_to_put_where(tmp_path, monkeypatch):
    unreachable = RemoteFile("http://127.0.0.1:9/ml-100k.zip", "0" * 64)
    monkeypatch.setitem(DATASETS, NAME, replace(DATASETS[NAME], downloads=(unreachable,)))
    with pytest.raises(
        DataError, match=r"could not be downloaded .*put u\.data .*prepare movielens-100k --from DIR"
    ):
        prepare(NAME, source=None, cache=tmp_path)


@pytest.mark.parametrize(
    ("name", "split", "file"),
    [("celeba", "random", "list_attr_celeba.txt"), ("movielens", "authors", "comet_split_val.parquet")],
)
def test_if_there_is_no_download_the_error_says_which_files_to_put_where(tmp_path, name, split, file):
    with pytest.raises(
        DataError, match=rf"cannot be downloaded for you: put .*{file}.*prepare {name} --from DIR"
    ):
        prepare(name, source=None, cache=tmp_path, split=split)
