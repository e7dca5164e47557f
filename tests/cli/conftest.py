"""Every command-line test has its own cache of prepared data."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COMET_MOE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
