"""Without a network, and without transformers' reports."""

import pytest
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
