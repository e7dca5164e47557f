"""Studies keep prepared data in a folder of their own."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COMET_MOE_CACHE", str(tmp_path / "cache"))
