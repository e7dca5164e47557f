"""Causes 4 and 6: files of our own, and checkpoints, are not trusted: one sentence, no code, no traceback."""

import json
import shutil
from functools import partial

import pytest
from made_studies import random_trials, write_study
from outcomes import message_of, refuse, survive

DEEP = "[" * 100_000
NOT_JSON = {
    "empty": "",
    "truncated": '{"a": 1',
    "a list": "[]",
    "a number": "3",
    "null": "null",
    "text": '"text"',
    "deep": DEEP,
    "not UTF-8": b"\xff\xfe\x00",
    "many digits": '{"epoch": ' + "9" * 6000 + "}",
    "a list of lists": "[[1], [2]]",
}


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


# In each of these files, and by the command that reads it, every content above is refused.
RESUME = ["train", "multidigits", "--resume", "--out"]
FILES = {
    "result.json": ("image", RESUME),
    "config.yaml": ("image", ["evaluate"]),
    "data.json": ("image", ["evaluate"]),
    "environment.json": ("stopped", RESUME),
    "metrics.jsonl": ("stopped", RESUME),
}


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_of_a_run_is_named(copy, file):
    run, command = FILES[file]
    folder = copy(run)
    may_be_empty = {"environment.json": ["a list", "empty"], "metrics.jsonl": ["a list", "empty"]}
    for name in NOT_JSON.keys() - may_be_empty.get(file, []):
        write(folder / file, NOT_JSON[name])
        assert file in refuse(*command, folder)


@pytest.mark.parametrize("file", ["result.json", "metrics.jsonl", "config.yaml", "environment.json"])
def test_the_page_names_a_damaged_file(copy, tmp_path, file):
    folder = copy("image")
    for content in ("truncated", "a list", "deep", "not UTF-8"):
        write(folder / file, NOT_JSON[content])
        done = survive("report", folder, "-o", tmp_path / "page.html")
        assert done.code == 0 or file in done.err


def test_a_damaged_vocabulary_is_named(copy, made, tmp_path):
    folder = copy("ratings")
    for content in ("empty", "a number", "deep", "a list of lists"):
        write(folder / "user.vocabulary.json", NOT_JSON[content])
        arguments = ["predict", folder, made / "mine.csv", "-o", tmp_path / "out.csv"]
        assert "user.vocabulary.json" in refuse(*arguments)
        assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("file", ["study.json", "trials.jsonl"])
@pytest.mark.parametrize("verb", ["table", "curves"])
def test_a_damaged_study_is_named(tmp_path, verb, file):
    folder = write_study(tmp_path / "study", random_trials(["comet"], 3))
    for name in NOT_JSON.keys() - (["empty"] if file == "trials.jsonl" else []):
        write(folder / file, NOT_JSON[name])
        assert file in refuse(verb, folder)


def changes(tree, path=()):
    """Every way to change one field of ``tree`` to something of another kind, or to leave it out."""
    for name, value in tree.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from changes(value, (*path, name))


def change_field(tree, path, value):
    *above, last = path
    for name in above:
        tree = tree[name]
    if value is ...:
        del tree[last]
    else:
        tree[last] = value


OTHERS = (..., None, [], {}, "text", -1, 1e300, [["deep"]])


@pytest.mark.parametrize("file", ["result.json", "data.json"])
@pytest.mark.parametrize("run", ["image", "ratings", "table"])
def test_no_changed_field_of_a_run_ends_in_a_traceback(copy, run, file):
    """All fields, each with values of other kinds: several hundred cases."""
    from comet_moe.experiments.training.recipe import load_run
    from comet_moe.experiments.training.run import RunFolder

    folder = copy(run)

    def read():
        RunFolder(folder).result() if file == "result.json" else load_run(folder)

    original = json.loads((folder / file).read_text())
    refused = 0
    others = OTHERS[::2] if file == "result.json" else OTHERS[1::3]  # each builds the model
    for path in list(changes(original)):
        for other in others:
            tree = json.loads(json.dumps(original))
            change_field(tree, path, other)
            (folder / file).write_text(json.dumps(tree))
            message = message_of(read)
            refused += message is not None
            assert message is None or str(folder) in message or "recipe" in message, (path, other, message)
    assert refused > 20


@pytest.mark.parametrize("name", ["study.json", "trials.jsonl"])
def test_no_changed_field_of_a_study_ends_in_a_traceback(tmp_path, name):
    from comet_moe.experiments.studies.reading import read_studies
    from comet_moe.experiments.studies.tables import compare_gates

    folder = write_study(tmp_path / "study", random_trials(["comet"], 3))
    lines = (folder / name).read_text().splitlines() if name.endswith("l") else [(folder / name).read_text()]
    original = json.loads(lines[0])
    refused = 0
    for path in list(changes(original)):
        for other in OTHERS[::2]:
            tree = json.loads(json.dumps(original))
            change_field(tree, path, other)
            (folder / name).write_text("\n".join([json.dumps(tree), *lines[1:]]) + "\n")
            refused += message_of(lambda: compare_gates(*read_studies([folder]))) is not None
    assert refused > 20


def test_no_changed_field_of_a_prepared_data_set_ends_in_a_traceback(made, tmp_path):
    from comet_moe.experiments.data.cache import open_dataset

    def read(folder):
        dataset = open_dataset(folder)
        for name in dataset.meta.get("vocabularies", {}):
            dataset.vocabulary(name)

    for prepared in sorted((made / "cache").glob("[!.]*-*")):
        folder = shutil.copytree(prepared, tmp_path / prepared.name)
        original = json.loads((folder / "meta.json").read_text())
        refused = 0
        for path in list(changes(original)):
            for other in OTHERS[::2]:
                tree = json.loads(json.dumps(original))
                change_field(tree, path, other)
                (folder / "meta.json").write_text(json.dumps(tree))
                message = message_of(partial(read, folder))
                refused += message is not None
                assert message is None or str(folder) in message
        assert refused > 20


@pytest.mark.parametrize(
    "content", [b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00v\x00{'descr': '|O', }", b"x" * 100]
)
def test_a_damaged_array_of_a_prepared_data_set_is_named(made, tmp_path, content):
    from comet_moe.exceptions import DamagedCacheError
    from comet_moe.experiments.data.cache import open_dataset

    (prepared,) = (made / "cache").glob("ratings-*")
    folder = shutil.copytree(prepared, tmp_path / "set")
    (folder / "train.features.user.npy").write_bytes(content)
    meta = json.loads((folder / "meta.json").read_text())
    meta["files"]["train.features.user.npy"] = len(content)
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DamagedCacheError, match="delete"):
        open_dataset(folder)


# Code from a checkpoint.

CODE = """from pathlib import Path
from transformers import BertConfig as C
Path(__file__).with_name('ran').touch()
"""


@pytest.mark.parametrize("model_type", ["bert", "their-own", None])
@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_code_of_a_checkpoint_is_never_run(tiny, tmp_path, monkeypatch, part, model_type):
    import tiny_bert

    checkpoint = shutil.copytree(tiny / "tiny", tmp_path / "tiny")
    (checkpoint / "theirs.py").write_text(CODE)
    name = "config.json" if part == "config" else "tokenizer_config.json"
    config = json.loads((checkpoint / name).read_text())
    if part == "config":
        config["auto_map"] = {"AutoConfig": "theirs.C", "AutoModelForSequenceClassification": "theirs.C"}
        config |= {"model_type": model_type} if model_type else {}
        if model_type is None:
            del config["model_type"]
    else:
        config |= {"auto_map": {"AutoTokenizer": ["theirs.C", "theirs.C"]}, "tokenizer_class": "Theirs"}
    (checkpoint / name).write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("asked whether to run code"))
    done = survive(
        *("bert", "finetune", "rte", "--model", checkpoint, "--data", tiny / "data"),
        *(*tiny_bert.sets(["finetune.epochs=1"]), "--out", tmp_path / "run"),
    )
    assert not list(tmp_path.rglob("ran"))
    if model_type == "their-own" and part == "config":
        assert done.code == 2


@pytest.mark.parametrize("name", ["pytorch_model.bin"])
def test_a_pickle_that_runs_code_is_refused(tiny, tmp_path, name):
    import pickle

    import tiny_bert

    class Attack:
        def __reduce__(self):
            return (print, ("ran",))

    checkpoint = shutil.copytree(tiny / "tiny", tmp_path / "tiny")
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_bytes(pickle.dumps({"bert.embeddings.word_embeddings.weight": Attack()}))
    refuse(
        *("bert", "finetune", "rte", "--model", checkpoint, "--data", tiny / "data"),
        *(*tiny_bert.sets(), "--out", tmp_path / "run"),
        says=str(checkpoint),
    )


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": 3}', '{"model_type": "gpt2"}', DEEP])
def test_a_damaged_configuration_of_a_checkpoint_is_named(tiny, tmp_path, content):
    import tiny_bert

    checkpoint = shutil.copytree(tiny / "tiny", tmp_path / "tiny")
    (checkpoint / "config.json").write_text(content)
    refuse(
        *("bert", "finetune", "rte", "--model", checkpoint, "--data", tiny / "data"),
        *(*tiny_bert.sets(), "--out", tmp_path / "run"),
        says=str(checkpoint),
    )


@pytest.mark.parametrize("which", ["run", "run/teacher"])
def test_damaged_weights_of_a_bert_are_named(tiny, tmp_path, which):
    folder = shutil.copytree(tiny / "run", tmp_path / "run").parent / which
    for content in (b"", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ", b"\xff" * 64):
        (folder / "model" / "model.safetensors").write_bytes(content)
        refuse("bert", "evaluate", folder)


@pytest.mark.parametrize("name", ["\n", "a\rb", "\u2028", "\x1b[31m"])
def test_names_of_fields_stay_in_one_line(name):
    from comet_moe.exceptions import StudyError
    from comet_moe.experiments.studies.records import TrialRecord
    from comet_moe.files import parse_json

    trial = {"gate": "topk", "index": 0, "status": "complete", "tasks": {name: None}}
    message = message_of(lambda: parse_json(json.dumps(trial), "trials.jsonl", TrialRecord, StudyError, "x"))
    assert message.isprintable()
