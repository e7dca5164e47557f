"""Cause 1: weights that are not there. A checkpoint is complete or refused."""

import json

import pytest
import torch
from outcomes import refuse
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from comet_moe.exceptions import RunError


def edit(path, change, metadata=True):
    """Write the tensors of ``path`` again after ``change``, with the metadata that were there."""
    with safe_open(path, framework="pt") as file:
        kept = file.metadata() if metadata else None
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata=kept)


def drop(prefix):
    def change(tensors):
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return change


def first(tensors, prefix=""):
    return next(name for name in sorted(tensors) if name.startswith(prefix) and tensors[name].dim() > 0)


def retype(dtype, prefix=""):
    def change(tensors):
        name = first(tensors, prefix)
        tensors[name] = tensors[name].to(dtype)

    return change


def reshape(prefix=""):
    def change(tensors):
        name = first(tensors, prefix)
        tensors[name] = torch.zeros(3, 3, 3, dtype=tensors[name].dtype)

    return change


def add(tensors):
    tensors["surplus"] = torch.zeros(2)


def drop_one(tensors):
    del tensors[first(tensors)]


def empty(tensors):
    tensors.clear()


DAMAGES = {
    "one missing": drop_one,
    "all missing": empty,
    "one more": add,
    "float64": retype(torch.float64),
    "int32": retype(torch.int32),
    "bfloat16": retype(torch.bfloat16),
    "other shape": reshape(),
}


@pytest.mark.parametrize(
    ("verb", "run", "damage"),
    [
        *(("evaluate", "image", damage) for damage in DAMAGES),
        *(("evaluate", run, damage) for run in ("ratings", "table") for damage in ("one missing", "float64")),
        *(("predict", run, "one missing") for run in ("ratings", "table")),
        ("export", "image", "one missing"),
    ],
)
def test_a_model_file_is_complete_or_refused(copy, made, tmp_path, run, verb, damage):
    folder = copy(run)
    edit(folder / "model.safetensors", DAMAGES[damage])
    table = made / ("mine.csv" if run == "ratings" else "customers.csv")
    arguments = {
        "evaluate": ["evaluate", folder],
        "predict": ["predict", folder, table, "-o", tmp_path / "out.csv"],
        "export": ["export", folder, "--format", "torch", "-o", tmp_path / "out.pt2"],
    }[verb]
    refuse(*arguments, says="model.safetensors")
    assert not (tmp_path / "out.csv").exists()
    assert not (tmp_path / "out.pt2").exists()


CHECKPOINTS = {
    "without Adam": drop("optimizer."),
    "without best weights": drop("best."),
    "without weights": drop("model."),
    "without one moment": drop("optimizer.0.exp_avg_sq"),
    "with more": add,
    "empty": empty,
    "with another dtype": retype(torch.float64, "model."),
    "with Adam in another dtype": retype(torch.float64, "optimizer."),
    "with another shape": reshape("best."),
    "with Adam in another shape": reshape("optimizer."),
}


@pytest.mark.parametrize("damage", CHECKPOINTS)
def test_a_run_resumes_from_a_complete_checkpoint_or_not_at_all(copy, damage):
    folder = copy("stopped")
    edit(folder / "checkpoint" / "state.safetensors", CHECKPOINTS[damage])
    refuse("train", "multidigits", "--out", folder, "--resume", says="state.safetensors")
    assert not (folder / "result.json").exists()


STATES = {
    "no metadata": None,
    "a list": "[]",
    "no JSON": "{",
    "deep": "[" * 10_000,
    "text for a number": {"epoch": "many"},
    "an epoch of 0": {"epoch": 0},
    "a negative epoch": {"epoch": -3},
    "an infinite epoch": {"epoch": 1e400},
    "a warning that is no list": {"warned": {"x": 3}},
    "a further field": {"more": 1},
    "another layout": {"layout": "0"},
    "an epoch beyond the metrics": {"epoch": 2000},
}


@pytest.mark.parametrize("change", STATES)
def test_the_state_of_a_checkpoint_is_read_through_its_type(copy, change):
    folder = copy("stopped")
    path = folder / "checkpoint" / "state.safetensors"
    with safe_open(path, framework="pt") as file:
        state = json.loads(file.metadata()["state"])
    given = STATES[change]
    text = given if given is None or isinstance(given, str) else json.dumps(state | given)
    save_file(load_file(path), path, metadata=None if text is None else {"state": text})
    refuse("train", "multidigits", "--out", folder, "--resume", says=str(folder))


@pytest.mark.parametrize(
    ("which", "damage"), [("run", "one missing"), ("run", "other shape"), ("run/teacher", "one more")]
)
def test_bert_evaluates_complete_weights_only(tiny, tmp_path, which, damage):
    import shutil

    folder = shutil.copytree(tiny / "run", tmp_path / "run")
    edit(folder.parent / which / "model" / "model.safetensors", DAMAGES[damage])
    refuse("bert", "evaluate", folder.parent / which, says="model")


@pytest.mark.parametrize("damage", ["one missing", "all missing", "one more", "other shape"])
def test_a_teacher_needs_every_weight_but_those_of_its_head(tiny, tmp_path, damage):
    import shutil

    import tiny_bert

    checkpoint = shutil.copytree(tiny / "tiny", tmp_path / "tiny")
    edit(checkpoint / "model.safetensors", DAMAGES[damage])
    refuse(
        *("bert", "finetune", "rte", "--model", checkpoint, "--data", tiny / "data"),
        *(*tiny_bert.sets(), "--out", tmp_path / "run"),
        says=str(checkpoint),
    )
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_without_a_weight_file_is_refused(tiny, tmp_path):
    import shutil

    import tiny_bert

    checkpoint = shutil.copytree(tiny / "tiny", tmp_path / "tiny")
    (checkpoint / "model.safetensors").unlink()
    arguments = ["--model", checkpoint, "--data", tiny / "data", *tiny_bert.sets(), "--out", tmp_path / "run"]
    refuse("bert", "finetune", "rte", *arguments, says=str(checkpoint))


def test_the_importance_of_neurons_is_what_was_written(tiny, tmp_path):
    import shutil

    from comet_moe.experiments.bert.run import BertFolder

    folder = BertFolder(shutil.copytree(tiny / "run" / "teacher", tmp_path / "teacher"))
    for tensors in ({}, {"importance": torch.zeros(3)}, {"importance": torch.full((2, 2), float("nan"))}):
        save_file(tensors, folder.importance_file)
        with pytest.raises(RunError, match=r"importance\.safetensors is not what was written"):
            folder.importance()
