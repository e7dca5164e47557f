"""Tests run without a network, and without reports of transformers."""

import pytest

try:
    from transformers.utils import logging
except ModuleNotFoundError:
    collect_ignore_glob = ["test_*.py"]
else:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
