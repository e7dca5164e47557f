"""A small data set to prepare, and a folder to prepare it in."""

import pytest
from raw_files import some_ratings, write_ml100k


@pytest.fixture
def raw(tmp_path):
    """The raw files of movielens-100k."""
    folder = tmp_path / "raw"
    folder.mkdir()
    return write_ml100k(folder, some_ratings())


@pytest.fixture
def store(tmp_path):
    """The cache, not there yet."""
    return tmp_path / "cache"
