"""Tests run without a network, and without reports of transformers."""

import os

import pytest
from command import succeed
from transformers.utils import logging

from tiny_bert import save_checkpoint, sets, where, write_rte, write_squad

logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """A checkpoint, the files of two tasks, and a finished teacher."""
    root = tmp_path_factory.mktemp("bert")
    save_checkpoint(root / "tiny")
    write_rte(root / "data")
    write_squad(root / "data" / "squad")
    os.environ["HF_HUB_OFFLINE"] = "1"
    succeed("bert", "finetune", "rte", *where(root), *sets(), "--out", root / "teacher")
    return root
