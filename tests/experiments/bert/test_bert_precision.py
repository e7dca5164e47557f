"""BERT in bfloat16: other products, weights of the same type, losses near those of float32; it resumes."""

import json
import shutil

import pytest
import torch
from command import succeed
from safetensors.torch import load_file

import tiny_bert

SETTINGS = ["finetune.epochs=1", "training.epochs=2", "training.device=cpu", "training.threads=1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with one run of both stages in each precision."""
    root = tmp_path_factory.mktemp("precision")
    torch.manual_seed(0)
    tiny_bert.save_checkpoint(root / "tiny")
    tiny_bert.write_rte(root / "data", train=32, dev=16)
    for precision in ("float32", "bfloat16"):
        settings = tiny_bert.sets([*SETTINGS, f"training.precision={precision}"])
        succeed("bert", "run", "rte", *tiny_bert.where(root), *settings, "--out", root / precision)
    return root


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def test_losses_are_not_equal_and_those_of_teachers_are_close(runs):
    for stage in (".", "teacher"):
        single, half = (result_of(runs / name / stage)["validation_loss"] for name in ("float32", "bfloat16"))
        assert half != single
        if stage == "teacher":  # a student's gates may choose other experts where two are nearly equal
            assert half == pytest.approx(single, rel=0.05)


def test_weights_stay_in_float32(runs):
    kinds = {
        name: {tensor.dtype for tensor in load_file(runs / name / "model" / "model.safetensors").values()}
        for name in ("float32", "bfloat16")
    }
    assert kinds["float32"] == kinds["bfloat16"] == {torch.float32}


def test_a_run_in_bfloat16_resumes_to_the_same_result(runs, tmp_path):
    stopped = shutil.copytree(runs / "bfloat16", tmp_path / "run")
    (stopped / "result.json").unlink()
    settings = tiny_bert.sets([*SETTINGS, "training.precision=bfloat16"])
    succeed("bert", "run", "rte", *tiny_bert.where(runs), *settings, "--out", stopped, "--resume")
    before, after = result_of(runs / "bfloat16"), result_of(stopped)
    assert after["validation_loss"] == before["validation_loss"]
