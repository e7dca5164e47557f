"""Causes 2, 3 and 5: no file is lost or replaced, one process trains a run, names stay in their folder."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from outcomes import SMALL, listing, refuse, sets, survive

from comet_moe.exceptions import CometError, RunLockedError, UnsafePathError, WriteError
from comet_moe.experiments.training.run import RunFolder
from comet_moe.files import (
    LockTimeout,
    append_text,
    file_lock,
    inside,
    plain_name,
    remove_files,
    temporary_files,
    write_text,
)

KINDS = ("link", "dangling", "folder", "device")


def make_target(folder, kind, name):
    """Something at ``name`` that must not be replaced."""
    path = folder / name
    if kind == "link":
        (folder / "kept").write_text("kept")
        path.symlink_to(folder / "kept")
    elif kind == "dangling":
        path.symlink_to(folder / "nowhere")
    elif kind == "folder":
        path.mkdir()
    else:
        path = Path("/dev/null")
    return path


@pytest.mark.parametrize(
    ("verb", "kind"),
    [*(("report", kind) for kind in KINDS), ("export", "link"), ("predict", "link"), ("predict", "folder")],
)
def test_an_output_that_is_no_regular_file_is_refused(made, tmp_path, verb, kind):
    name = {"report": "page.html", "export": "model.pt2", "predict": "out.csv"}[verb]
    target = make_target(tmp_path, kind, name)
    before, mode = listing(tmp_path), target.lstat().st_mode
    arguments = {
        "report": ["report", made / "image", "-o", target],
        "export": ["export", made / "image", "--format", "torch", "-o", target],
        "predict": ["predict", made / "ratings", made / "mine.csv", "-o", target],
    }[verb]
    refuse(*arguments)
    assert target.lstat().st_mode == mode
    assert listing(tmp_path) == before


def test_a_failed_export_keeps_the_old_file(copy, tmp_path):
    (tmp_path / "model.pt2").write_text("old")
    folder = copy("image")
    (folder / "model.safetensors").write_bytes(b"no weights")
    refuse("export", folder, "--format", "torch", "-o", tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").read_text() == "old"


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        ("export", "model.safetensors"),
        ("export", "config.yaml"),
        ("export", "result.json"),
        ("export", "model.pt2"),  # the default format is ONNX
        ("report", "metrics.jsonl"),
        ("report", "model.safetensors"),
        ("predict", "data.json"),
        ("inspect", "data.json"),
    ],
)
def test_an_output_of_another_kind_is_not_replaced(made, copy, verb, name):
    folder = copy("ratings")
    (folder / "model.pt2").write_text("old")
    before = (folder / name).read_bytes()
    arguments = {
        "export": ["export", folder],
        "report": ["report", folder],
        "predict": ["predict", folder, made / "mine.csv"],
        "inspect": ["data", "inspect", made / "customers.csv", "--targets", "bought"],
    }[verb]
    refuse(*arguments, "-o", folder / name, says=name)
    assert (folder / name).read_bytes() == before


def test_resume_keeps_the_hidden_files_of_a_user(copy):
    folder = copy("stopped")
    names = (".backup.2024", ".notes.1", ".result.json.12345", ".model.0123456789abcdef")
    files = [folder / where / name for name in names for where in (".", "checkpoint")]
    for file in files:
        file.write_text("mine")
    assert survive("train", "multidigits", "--out", folder, "--resume").code == 0
    assert all(file.read_text() == "mine" for file in files)


@pytest.mark.parametrize("kind", ["checkpoint", "state.safetensors", "metrics.jsonl", "environment.json"])
def test_resume_does_not_write_or_delete_behind_a_link(copy, tmp_path, kind):
    folder = copy("stopped")
    path = folder / "checkpoint" / kind if kind.startswith("state") else folder / kind
    outside = tmp_path / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)
    (tmp_path / ".1234.5678").write_text("mine")
    before = listing(outside) if outside.is_dir() else outside.read_bytes()
    refuse("train", "multidigits", "--out", folder, "--resume", says="link")
    assert (listing(outside) if outside.is_dir() else outside.read_bytes()) == before


def test_what_a_kill_left_is_removed_by_its_exact_name(copy):
    folder = RunFolder(copy("stopped"))
    left = [f".result.json.{'a' * 16}.tmp", f".config.yaml.{'0' * 16}.tmp"]
    others = [f".other.txt.{'a' * 16}.tmp", f".result.json.{'a' * 15}.tmp", ".result.json.tmp"]
    for name in (*left, *others):
        (folder.path / name).write_text("")
    folder.remove_temporary_files()
    names = {path.name for path in folder.path.iterdir()}
    assert not names & set(left)
    assert names >= set(others)


def test_a_model_is_dropped_without_what_a_user_put_beside_it(tiny, tmp_path):
    from comet_moe.experiments.bert.run import BertFolder

    folder = BertFolder(shutil.copytree(tiny / "run", tmp_path / "run"))
    (folder.model_folder / "notes.txt").write_text("mine")
    folder.drop_model()
    assert [path.name for path in folder.model_folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["tune", "multidigits", "--gates", "nonesuch", "--trials", "1"],
        ["tune", "multidigits", "--gates", "topk", "--trials", "1", "--set", "model.kernel_size=99"],
        ["tune", "multidigits", "--gates", "topk", "--trials", "1", "--set", "data.options.colour=1"],
        ["tune", "nonesuch", "--gates", "topk", "--trials", "1"],
        ["ablate", "multidigits", "--gates", "topk,topk", "--seeds", "1"],
        ["tune", "multidigits", "--gates", "topk", "--trials", "1", "--storage", "mysql://x/y"],
        ["tune", "multidigits", "--gates", "topk", "--trials", "1", "--storage", "no url"],
        ["ablate", "multidigits", "--gates", "topk", "--add-seeds", "3"],
        ["train", "multidigits", "--set", "gate=nonesuch"],
        ["train", "multidigits", "--set", "data.options.train_size=0"],
        ["compare", "nowhere.csv", "--targets", "a"],
    ],
    ids=lambda arguments: " ".join(arguments[2:])[:60],
)
def test_a_refused_command_leaves_no_folder_and_no_lock(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    refuse(*arguments, "--out", "new")
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_is_named_as_storage_stays_as_it_is(tmp_path):
    table = tmp_path / "mine.csv"
    table.write_text("a,b\n1,2\n" * 1000)
    before = table.read_bytes()
    gates = ["--gates", "topk", "--trials", "1", "--out", tmp_path / "study", *sets(SMALL[:-1])]
    refuse("tune", "multidigits", *gates, "--storage", f"sqlite:///{table}", says="cannot be used")
    assert table.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine.csv"]


# Two at once.


def test_a_run_that_another_process_trains_is_refused(copy):
    folder = copy("stopped")
    with RunFolder(folder).lock():
        refuse("train", "multidigits", "--out", folder, "--resume", says="another process trains the run")
    assert survive("train", "multidigits", "--out", folder, "--resume").code == 0
    assert not (folder / ".lock").exists()


def test_a_lock_that_a_kill_left_stops_no_resume(copy):
    folder = copy("stopped")
    (folder / ".lock").write_text("")
    assert survive("train", "multidigits", "--out", folder, "--resume").code == 0


def test_a_new_run_that_another_process_starts_is_refused(tmp_path):
    with RunFolder(tmp_path / "run").lock():
        refuse("train", "multidigits", *sets(SMALL), "--out", tmp_path / "run", says="another process")
    assert not (tmp_path / "run").exists()


def test_two_stages_of_bert_do_not_train_one_run(tiny, tmp_path):
    from comet_moe.experiments.bert.run import BertFolder
    from comet_moe.experiments.bert.stages import distill, finetune

    for which, stage in (("run", distill), ("run/teacher", finetune)):
        folder = BertFolder(shutil.copytree(tiny / which, tmp_path / which.replace("/", "-")))
        folder.result_file.unlink()
        with folder.lock(), pytest.raises(RunLockedError):
            stage(folder.config(), folder)


def test_a_lock_is_exclusive_until_it_is_released(tmp_path):
    path = tmp_path / "new" / "lock"
    with file_lock(path), pytest.raises(LockTimeout), file_lock(path, timeout=0.05):
        pass
    with file_lock(path):
        assert path.exists()
    assert not path.exists()


def test_a_lock_is_not_taken_through_a_link(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WriteError), file_lock(tmp_path / "lock"):
        pass
    assert not (tmp_path / "elsewhere").exists()


# Names become paths.

OUTSIDE = ["../x", "../../etc/x", "/etc/x", "a/../../x", "..", ".", "", "a\\..\\x", "C:\\x", "C:x", "a\0b"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_in_a_file_does_not_lead_out_of_its_folder(tmp_path, name):
    with pytest.raises(UnsafePathError):
        inside(tmp_path, name)


def test_a_name_does_not_lead_through_a_link(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path)
    for name in ("link", "link/x"):
        with pytest.raises(UnsafePathError, match="symbolic link"):
            inside(tmp_path / "folder", name)
    assert inside(tmp_path / "folder", "a/b") == tmp_path / "folder" / "a" / "b"


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/b", "x" * 300, "a\nb", "\x1b[31m", "a\0"])
def test_the_name_of_a_recipe_does_not_choose_the_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "mine.yaml"
    from comet_moe.experiments.config.loader import read_recipe

    recipe.write_text(yaml.safe_dump(read_recipe("multidigits") | {"recipe": name}))
    refuse("train", recipe, *sets(SMALL))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]
    assert not plain_name(name)


@pytest.mark.parametrize("name", ["../../outside/x", "/etc/hostname", "link.json"])
def test_a_vocabulary_stays_in_its_data_set(made, tmp_path, name):
    from comet_moe.experiments.data.cache import open_dataset

    (prepared,) = (made / "cache").glob("ratings-*")
    folder = shutil.copytree(prepared, tmp_path / "set")
    (folder / "link.json").symlink_to(folder / "user.vocabulary.json")
    meta = json.loads((folder / "meta.json").read_text())
    meta["vocabularies"]["user"] = name
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(CometError):
        open_dataset(folder).vocabulary("user")


@pytest.mark.parametrize("name", ["/etc", "../..", "runs/../../x"])
@pytest.mark.parametrize("verb", ["table", "report"])
def test_the_run_of_a_trial_stays_in_its_study(tmp_path, verb, name):
    from made_studies import random_trials, write_study

    folder = write_study(tmp_path / "study", random_trials(["comet"], 3))
    lines = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    lines[1]["run"] = name
    (folder / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = ["-o", tmp_path / "page.html"] if verb == "report" else []
    refuse(verb, folder, *output, says="leads out of the folder")


@pytest.mark.parametrize("gate", ["../../x", "/etc", "comet/../..", "\x1b[2J", "nonesuch", ""])
def test_the_gates_of_a_shared_storage_are_gates(gate):
    from comet_moe.exceptions import StudyError
    from comet_moe.experiments.studies.definition import define_study, parse_definition

    definition = define_study("ablation", "multidigits", ["topk"], 1, settings=SMALL[:-1])
    content = json.loads(definition.model_dump_json())
    for section in ("space", "base"):
        content[section][gate] = content[section].pop("topk")
    with pytest.raises(StudyError):
        parse_definition(json.dumps(content), "the storage")


def test_a_study_opens_no_storage_outside_of_its_folder_unasked(tmp_path):
    from made_studies import random_trials, write_study

    folder = write_study(tmp_path / "study", random_trials(["comet"], 3))
    study = json.loads((folder / "study.json").read_text())
    study["storage"] = f"sqlite:///{tmp_path / 'other.sqlite'}"
    (folder / "study.json").write_text(json.dumps(study))
    refuse("ablate", study["recipe"], "--out", folder, "--resume", says="outside of its folder")
    assert not (tmp_path / "other.sqlite").exists()


def test_texts_are_not_appended_through_a_link(tmp_path):
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    with pytest.raises(WriteError):
        append_text(tmp_path / "link", "more")
    assert (tmp_path / "kept").read_text() == "kept"


def test_files_are_removed_by_name_and_never_behind_a_link(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_text("kept")
    (tmp_path / "link").symlink_to(outside)
    remove_files(tmp_path / "link", ["a"])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").symlink_to(outside / "a")
    remove_files(tmp_path / "folder", ["a"])
    assert (outside / "a").read_text() == "kept"
    assert (tmp_path / "folder" / "a").is_symlink()


def test_a_link_under_a_guessed_temporary_name_is_not_followed(tmp_path):
    (tmp_path / "kept").write_text("kept")
    for number in range(10):
        (tmp_path / f".result.json.{os.getpid() + number}").symlink_to(tmp_path / "kept")
    write_text(tmp_path / "result.json", "new")
    assert (tmp_path / "kept").read_text() == "kept"
    assert temporary_files(tmp_path / "result.json") == []


# Escapes.

HOSTILE = "\x1b]0;owned\x07\x1b[31mred"


def test_control_characters_of_names_do_not_reach_the_terminal(copy, tmp_path):
    folder = copy("image")
    result = json.loads((folder / "result.json").read_text())
    result["tasks"] = {HOSTILE: result["tasks"]["top_left"]}
    (folder / "result.json").write_text(json.dumps(result))
    done = survive("train", "multidigits", "--out", folder, "--resume")
    assert done.code == 0
    assert "\x1b" not in done.out + done.err
    assert "\\x1b]0;owned" in done.out
    refuse("table", tmp_path / HOSTILE.replace("/", ""))
