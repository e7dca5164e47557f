"""Fuzzing of every reader: whatever a file holds, it is read, or refused by one of the library's errors.

No other exception, no endless loop, nothing written outside of the folder of the test.
"""

import gzip
import io
import json
import os
import struct
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_studies import random_trials, write_study
from safetensors.torch import save

from comet_moe.exceptions import CometError
from comet_moe.experiments.config import load_config
from comet_moe.experiments.config.loader import read_recipe
from comet_moe.experiments.config.values import read_yaml
from comet_moe.experiments.data.sets import images, jester
from comet_moe.experiments.data.sets.ratings import read_pairs
from comet_moe.experiments.data.table.source import TableSource, find_tables
from comet_moe.experiments.studies.reading import read_studies
from comet_moe.experiments.studies.tables import compare_gates
from comet_moe.experiments.training.records import CheckpointRecord
from comet_moe.experiments.training.run import RunFolder

EXAMPLES = int(os.environ.get("COMET_MOE_FUZZ", "100"))

bounded = settings(
    max_examples=EXAMPLES,
    deadline=None,  # a hang meets the limit of a test; an example may wait long for a busy machine
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def damaged(content):
    """``content`` with bytes replaced, a part cut out, or something put in."""
    return st.builds(
        lambda at, length, new: (
            content[: at % (len(content) + 1)] + new + content[at % (len(content) + 1) + length :]
        ),
        st.integers(0, 10**6),
        st.integers(0, 64),
        st.binary(max_size=16),
    )


def changed(tree):
    """``tree`` with the value of one of its fields, at any depth, replaced."""
    paths = list(_paths(tree))
    return st.builds(_replaced, st.just(tree), st.sampled_from(paths), json_values)


def _paths(tree, path=()):
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from _paths(value, (*path, key))


def _replaced(tree, path, value):
    copied = inner = json.loads(json.dumps(tree))
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copied


def read(action, folder):
    """Read, or be refused in one line; nothing may appear beside the folder."""
    before = set(folder.parent.iterdir())
    try:
        action()
    except CometError as error:
        message = str(error)
        assert message
        assert "\n" not in message.strip()
    assert set(folder.parent.iterdir()) == before


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "inner"
        path.mkdir()
        yield path


TABLE = b"user,item,rating\na,1,2.5\n" + b"b,2,3\n" * 20 + 'ü,"x,y",4\n'.encode()


@bounded
@given(content=st.binary(max_size=200) | damaged(TABLE), suffix=st.sampled_from([".csv", ".tsv", ".parquet"]))
def test_tables(folder, content, suffix):
    path = folder / f"table{suffix}"
    path.write_bytes(content)
    read(lambda: read_pairs(path), folder)
    read(lambda: [len(batch) for batch in TableSource(find_tables(path)).batches()], folder)


@bounded
@given(data=st.data())
def test_parquet(folder, data):
    import pyarrow as pa
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pa.table({"user": ["a", "b"], "item": [1, 2], "rating": [1.0, 2.0]}), buffer)
    path = folder / "table.parquet"
    path.write_bytes(data.draw(damaged(buffer.getvalue())))
    read(lambda: read_pairs(path), folder)


RECIPE = yaml.safe_dump(read_recipe("multidigits")).encode()


@bounded
@given(text=st.text(max_size=60) | damaged(RECIPE).map(lambda content: content.decode(errors="replace")))
def test_yaml(folder, text):
    with suppress(yaml.YAMLError):
        read_yaml(text)
    path = folder / "recipe.yaml"
    path.write_bytes(text.encode(errors="replace"))
    read(lambda: load_config(str(path)), folder)


@bounded
@given(recipe=changed(read_recipe("multidigits")))
def test_recipes(folder, recipe):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    read(lambda: load_config(str(path)), folder)


@bounded
@given(
    setting=st.text(max_size=30)
    | st.builds(
        "{}={}".format,
        st.sampled_from(
            [
                "gate",
                "gates",
                "gates.comet",
                "gate.k",
                "training.epochs",
                "model.units",
                "data.options",
                "data.path",
                "seed",
            ]
        ),
        st.text(max_size=20),
    )
)
def test_settings(folder, setting):
    read(lambda: load_config("multidigits", [setting]), folder)


EVALUATION = {
    "loss": 1.0,
    "tasks": {"a": {"loss": 1.0}},
    "experts_per_sample": 1.0,
    "flops_per_sample": 1.0,
    "routing": {},
}
EPOCH = {
    "epoch": 1,
    "train_loss": 1.0,
    "train_aux_loss": 0.0,
    "samples_per_second": 1.0,
    "validation": EVALUATION,
    "best_validation_loss": 1.0,
    "patience_left": 1,
    "seconds": 1.0,
}
RESULT = {"status": "complete", "test_loss": 1.0, "tasks": {"a": {"loss": 1.0}}, "notes": ["a"], "seed": 1}
META = {"name": "x", "rows": {"train": 3}, "notes": [], "image_shape": [1, 4, 4], "classes": {"a": 2}}


@bounded
@given(
    result=changed(RESULT).map(json.dumps) | st.text(max_size=20),
    epoch=changed(EPOCH).map(json.dumps) | st.text(max_size=20),
    meta=changed(META).map(json.dumps) | st.text(max_size=20),
    start=json_values.map(json.dumps),
)
def test_run_folders(folder, result, epoch, meta, start):
    run = RunFolder(folder / "run")
    run.path.mkdir(exist_ok=True)
    for file, text in (
        (run.config_file, "recipe: x"),
        (run.result_file, result),
        (run.metrics_file, epoch + "\n"),
        (run.data_file, meta),
        (run.environment_file, start),
    ):
        file.write_bytes(text.encode(errors="replace"))
    read(run.result, folder)
    read(run.metrics, folder)
    read(run.saved_meta, folder)
    read(lambda: run.append_environment({}), folder)
    read(lambda: run.truncate_metrics(1), folder)
    read(lambda: run.check_data({"name": "x"}), folder)


STATE = CheckpointRecord(
    epoch=1, best_epoch=1, best_selection_loss=1.0, best_loss=1.0, seconds=1.0, warned={"a": ["b"]}
).model_dump()


@bounded
@given(state=changed(STATE).map(json.dumps) | st.text(max_size=20), data=st.data())
def test_safetensors_metadata(folder, state, data):
    content = save({"model.a": torch.zeros(2)}, metadata={"state": state})
    run = RunFolder(folder / "checkpointed")
    run.checkpoint_file.parent.mkdir(parents=True, exist_ok=True)
    for written in (content, data.draw(damaged(content))):
        run.checkpoint_file.write_bytes(written)
        read(run.checkpoint, folder)


@pytest.fixture(scope="module")
def study(folder):
    path = write_study(folder / "study", random_trials(["comet", "topk"], 3))
    trials = [json.loads(line) for line in (path / "trials.jsonl").read_text().splitlines()]
    return path, json.loads((path / "study.json").read_text()), trials


@bounded
@given(data=st.data())
def test_study_folders(folder, study, data):
    path, record, trials = study
    (path / "study.json").write_text(json.dumps(data.draw(st.just(record) | changed(record))))
    (path / "trials.jsonl").write_text(
        "".join(json.dumps(trial) + "\n" for trial in data.draw(st.just(trials) | changed(trials)))
    )
    read(lambda: compare_gates(*read_studies([path])), folder)


IDX = struct.pack(">BBBBIII", 0, 0, 8, 3, 2, 3, 4) + bytes(24)


@bounded
@given(content=st.binary(max_size=64) | damaged(IDX), compressed=st.booleans())
def test_idx(folder, content, compressed):
    path = folder / ("images.gz" if compressed else "images")
    path.write_bytes(gzip.compress(content, 1) if compressed and len(content) % 2 else content)
    read(lambda: images.read_idx(path, 3), folder)


def made_npz():
    buffer = io.BytesIO()
    np.savez_compressed(buffer, ratings_x100=np.full((3, 5), 100, np.int16))
    return buffer.getvalue()


@bounded
@given(content=st.binary(max_size=64) | damaged(made_npz()))
def test_npz(folder, content):
    path = folder / "jester.npz"
    path.write_bytes(content)
    read(lambda: jester._read_part(path), folder)
