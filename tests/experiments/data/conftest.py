"""The raw files and the cache of a small data set."""

import pytest
from raw_files import some_ratings, write_ml100k


@pytest.fixture
def raw(tmp_path):
    """The raw files of the data set."""
    folder = tmp_path / "raw"
    folder.mkdir()
    return write_ml100k(folder, some_ratings())


@pytest.fixture
def store(tmp_path):
    """The cache, not there yet."""
    return tmp_path / "cache"
