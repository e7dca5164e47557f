"""Weights and checkpoints in which the state of a local search was changed."""

import pytest
import torch
from command import succeed
from outcomes import SMALL, refuse, sets
from safetensors import safe_open
from safetensors.torch import load_file, save_file


@pytest.fixture
def run(tmp_path):
    """A run that has searched."""
    settings = [*SMALL, "gate=comet+", "search.epochs=2"]
    succeed("train", "multidigits", *sets(settings), "--out", tmp_path / "run")
    return tmp_path / "run"


def change(file, **values):
    """Fill the tensors of the search with ``values``, by their names."""
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    for name, tensor in tensors.items():
        _, is_search, last = name.rpartition("search.")
        if is_search and last in values:
            tensors[name] = torch.full_like(tensor, values[last])
    save_file(tensors, file, metadata=metadata)


@pytest.mark.parametrize("progress", [10**15, -1])
def test_a_damaged_search_is_named_by_evaluate_and_by_resume(run, progress):
    for file in ("model.safetensors", "checkpoint/state.safetensors"):
        change(run / file, progress=progress, fixed=-1)
    refuse("evaluate", run, says="of a search must be")
    (run / "result.json").unlink()
    refuse("train", "multidigits", "--out", run, "--resume", says="of a search must be")


def test_a_search_that_became_shorter_is_named(run):
    (run / "result.json").unlink()
    change(run / "checkpoint" / "state.safetensors", progress=3, fixed=-1)  # of 4 steps
    config = run / "config.yaml"
    before, search, after = config.read_text().partition("search:\n")
    assert after.startswith("  epochs: 2")
    config.write_text(before + search + after.replace("  epochs: 2", "  epochs: 1", 1))
    refuse("train", "multidigits", "--out", run, "--resume", says="of a search must be")
