"""Studies as they are opened: default gates, studies to join, and recipes that no trial can be run with."""

import gc
import json
import math
import os
from pathlib import Path

import optuna
import pytest

from comet_moe.cli import _study
from comet_moe.exceptions import CometError, RecipeError, StudyError
from comet_moe.experiments.config import load_config, load_search_space
from comet_moe.experiments.studies import trial
from comet_moe.experiments.studies.defaults import FRONTIER
from comet_moe.experiments.studies.definition import StudyOptions
from comet_moe.experiments.studies.folder import StudyFolder
from comet_moe.experiments.studies.study import default_gates, open_study
from comet_moe.experiments.training.records import ResultRecord

SMALL = [f"data.options.{part}_size=32" for part in ("train", "validation", "test")]
RECIPE = """
data: {name: multidigits}
model: {kind: image, experts: 4, filters: [4], kernel_size: 3}
gate: comet
gates: {comet: {k: 2}, topk: {k: 2}}
training: {epochs: 1, batch_size: 32, learning_rate: 0.001}
tuning: {all: {training.learning_rate: {log: [0.001, 0.01]}}, search: {search.shared: {choice: %s}}}
"""


@pytest.fixture
def write_recipe(tmp_path):
    """A recipe whose trials of Top-k+ have one of the given values of ``search.shared``: not "tree"."""

    def write(shared):
        path = tmp_path / "own.yaml"
        path.write_text(RECIPE % shared)
        return str(path)

    return write


def options(path, recipe="multidigits", **changes):
    known = {"kind": "tuning", "gates": ["topk+"], "trials": 8, "settings": SMALL}
    return StudyOptions(recipe=recipe, out=path / "study", **known | changes)


def test_a_recipe_that_is_wrong_for_every_trial_is_refused_and_leaves_no_files(tmp_path, write_recipe):
    with pytest.raises(RecipeError, match=r"search.shared is tree, but the gate topk\+ has no"):
        open_study(options(tmp_path, write_recipe("[tree]"), gates=["topk", "topk+"]))
    assert not (tmp_path / "study").exists()


def test_a_recipe_that_is_right_for_some_trials_is_accepted(tmp_path, write_recipe):
    study = open_study(options(tmp_path, write_recipe("[tree, all]")))
    definition = study.definition
    shared = [definition.config("topk+", index).search.shared for index in range(8)]
    assert set(shared) == {"tree", "all"}


@pytest.mark.parametrize(
    ("recipe", "has_hash"),
    [("multidigits", False), ("celeba", False), ("movielens", True), ("bert-rte", True)],
)
def test_an_ablation_has_hash_gates_where_the_data_has_keys(recipe, has_hash):
    gates = default_gates("ablation", load_config(recipe))
    assert gates == [*FRONTIER, *(["hash", "hash+"] if has_hash else []), "topk", "topk+", "comet", "comet+"]


def test_an_ablation_of_images_starts_with_its_default_gates(tmp_path):
    study = open_study(options(tmp_path, kind="ablation", gates=None))
    assert study.definition.gates == [*FRONTIER, "topk", "topk+", "comet", "comet+"]


def test_a_tuning_study_that_names_no_gates_has_the_default_ones(tmp_path):
    study = open_study(options(tmp_path, gates=None))
    wanted = [*FRONTIER, "softmax", "topk", "topk+", "dselect", "comet", "comet+"]
    assert study.definition.gates == wanted


def test_a_study_that_starts_with_the_dense_network_has_the_experts_of_its_mixtures(tmp_path):
    open_study(options(tmp_path, gates=["dense", "topk"], trials=1))
    study = json.loads((tmp_path / "study" / "study.json").read_text())
    assert study["experts"] == load_config("multidigits", ["gate=topk"]).num_experts > 1


COMPLETE = ResultRecord(
    status="complete",
    validation_loss=1.5,
    test_loss=2.5,
    experts_per_sample=2.0,
    epochs=3,
    best_epoch=2,
    tasks={"rating": {"mse": 0.5, "loss": 0.5}},
)
PRUNED = COMPLETE.model_copy(update={"status": "pruned", "reason": "pruned after epoch 1 by median"})
FAILED = ResultRecord(status="failed", reason="the loss is nan at step 3 of epoch 1")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The text of ``study.json`` and ``trials.jsonl`` of a study with finished trials of each kind."""
    path = tmp_path_factory.mktemp("written")
    study = open_study(options(path, gates=["topk", "comet"], trials=2, prune="median"))
    for result in (COMPLETE, PRUNED, FAILED):
        study.queue.finish(study.queue.claim(study.definition), result)
    assert [(trial.gate, trial.index) for trial in study.refresh()] == [
        ("topk", 0),
        ("topk", 1),
        ("comet", 0),
    ]
    return study.folder.study_file.read_text(), study.folder.trials_file.read_text()


@pytest.fixture
def kept(tmp_path, written):
    """The folder of that study, of which only the two text files are left."""
    folder = StudyFolder(tmp_path / "study")
    folder.path.mkdir()
    folder.study_file.write_text(written[0])
    folder.trials_file.write_text(written[1])
    return folder


def resume(folder, **changes):
    changes = {"resume": True} | changes
    return open_study(options(folder.path.parent, gates=None, trials=None, **changes))


def test_a_study_resumes_from_its_two_text_files(kept):
    before = kept.trials_file.read_text()
    study = resume(kept)
    assert kept.trials_file.read_text() == before
    claim = study.queue.claim(study.definition)
    assert (claim.gate, claim.index) == ("comet", 1)
    assert study.queue.claim(study.definition) is None


def test_trials_can_be_added_to_a_study_that_was_kept_as_text(kept):
    study = resume(kept, add_trials=1)
    definition = study.definition
    claims = [study.queue.claim(definition) for _ in range(3)]
    assert [(claim.gate, claim.index) for claim in claims] == [("comet", 1), ("topk", 2), ("comet", 2)]


def test_gates_can_be_added_to_a_study(kept):
    before = kept.trials_file.read_text().splitlines()
    study = resume(kept, add_gates=["dense", "softmax"])
    definition = study.definition
    assert definition.gates == ["topk", "comet", "dense", "softmax"]
    assert definition.base["dense"] == load_config("multidigits", ["gate=dense", *SMALL])
    assert definition.space["softmax"] == load_search_space("multidigits", "softmax")
    assert json.loads(kept.study_file.read_text())["gates"] == definition.gates
    assert kept.trials_file.read_text().splitlines()[: len(before)] == before
    claims = [study.queue.claim(definition) for _ in range(3)]
    assert [(claim.gate, claim.index) for claim in claims] == [("dense", 0), ("softmax", 0), ("comet", 1)]


def test_gates_and_trials_can_be_added_together(kept):
    definition = resume(kept, add_gates=["dense"], add_trials=1).definition
    assert (definition.gates, definition.trials) == (["topk", "comet", "dense"], 3)


def test_added_gates_have_the_settings_of_the_study(tmp_path):
    settings = [*SMALL, "training.epochs=3", "gates.comet.k=1"]
    folder = open_study(options(tmp_path, gates=["topk"], settings=settings)).folder
    added = resume(folder, settings=[], add_gates=["comet"]).definition.base["comet"]
    assert added == load_config("multidigits", ["gate=comet", *settings])


def test_settings_can_be_given_for_added_gates(tmp_path):
    folder = open_study(options(tmp_path, gates=["topk"])).folder
    study = resume(folder, settings=["gates.comet.gamma=0.5"], add_gates=["comet"])
    definition = study.definition
    assert definition.base["comet"] == load_config("multidigits", ["gate=comet", "gate.gamma=0.5", *SMALL])
    assert "gate.gamma" not in definition.space["comet"]
    for file in folder.path.glob("study.sqlite*"):
        file.unlink()
    assert resume(folder, settings=[]).definition == definition


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"add_gates": ["dense", "comet"], "resume": False}, "gate comet is in the saved study already"),
        ({"add_gates": ["dense", "dense"]}, "gate dense is given twice"),
        ({"add_gates": ["dens"]}, "dens"),
        (
            {"add_gates": ["dense"], "only_gates": ["softmax"]},
            "softmax is not in the study, which has topk, c",
        ),
        ({"add_gates": ["dense"], "settings": ["training.epochs=4"]}, "training.epochs is 12 in the saved"),
    ],
)
def test_gates_that_cannot_be_added_leave_the_study_as_it_was(kept, changes, message):
    before = {file.name: file.read_text() for file in kept.path.iterdir()}
    with pytest.raises(CometError, match=message):
        resume(kept, add_trials=1, **changes)
    assert {file.name: file.read_text() for file in kept.path.iterdir()} == before
    definition = resume(kept).definition
    with pytest.raises(CometError, match=message):
        resume(kept, add_trials=1, **changes)
    assert resume(kept).definition == definition


def test_a_new_study_without_the_gate_to_train_leaves_no_files(tmp_path):
    with pytest.raises(StudyError, match="gate comet is not in the study, which has topk: leave it out of"):
        open_study(options(tmp_path, gates=["topk"], only_gates=["comet"]))
    assert not any(tmp_path.rglob("study*"))


def test_no_gate_is_added_by_a_recipe_that_has_changed(tmp_path, write_recipe):
    recipe = Path(write_recipe("[all]"))
    folder = open_study(options(tmp_path, str(recipe), gates=["topk", "comet"])).folder
    recipe.write_text(recipe.read_text().replace("comet: {k: 2}", "comet: {k: 1}"))
    with pytest.raises(StudyError, match="does not make comet what it is in the saved study"):
        resume(folder, recipe=str(recipe), add_gates=["dense"])


def test_a_kill_while_a_study_is_restored_loses_no_trial(kept, monkeypatch):
    before = kept.trials_file.read_text()
    add, added = optuna.Study.add_trial, []

    def add_one(study, trial):
        if added:
            raise KeyboardInterrupt
        added.append(add(study, trial))

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Study, "add_trial", add_one)
        with pytest.raises(KeyboardInterrupt):
            resume(kept)
    assert added
    resume(kept)
    assert kept.trials_file.read_text() == before


def test_the_data_are_opened_once_for_all_models_and_for_what_is_read_later(tmp_path, monkeypatch):
    opened = []
    load = trial.load_dataset
    monkeypatch.setattr(trial, "load_dataset", lambda config: opened.append(config.data) or load(config))
    study = open_study(options(tmp_path, gates=["dense", "topk", "comet"], trials=2))
    study.runner.dataset(study.base_config())
    assert len(opened) == 1


def test_a_handle_sees_trials_that_another_process_adds(tmp_path):
    study = open_study(options(tmp_path, gates=["topk"], trials=1))
    resume(study.folder, add_trials=1)
    study.refresh()
    assert (study.definition.trials, len(study.trials)) == (2, 2)
    study.add_trials(1)
    assert json.loads(study.folder.study_file.read_text())["trials"] == 3


def test_a_study_that_was_kept_as_text_keeps_its_settings(kept):
    with pytest.raises(StudyError, match=r"training\.epochs is 12 in the saved study, got 3"):
        resume(kept, settings=[*SMALL, "training.epochs=3"])
    assert not kept.sqlite_file.exists()


def test_a_value_that_another_machine_has_rounded_is_the_same(kept):
    first, *rest = map(json.loads, kept.trials_file.read_text().splitlines())
    rate = first["params"]["training.learning_rate"]
    first["params"]["training.learning_rate"] = math.nextafter(rate, 1)
    kept.trials_file.write_text("".join(json.dumps(line) + "\n" for line in (first, *rest)))
    study = resume(kept)
    assert study.queue.records(study.definition)[0].status == "complete"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("params", {"seed": 7}, "trial 0 of topk in .*trials.jsonl has {'seed': 7}, and the study plans "),
        ("validation_loss", None, "trial 0 of topk in .* is complete, but its validation_loss is None: rest"),
        ("validation_loss", math.nan, "trial 0 of topk in .* is complete, but its validation_loss is nan"),
    ],
)
def test_a_trial_that_the_study_does_not_plan_is_refused(kept, field, value, message):
    first, *rest = kept.trials_file.read_text().splitlines(keepends=True)
    kept.trials_file.write_text(json.dumps(json.loads(first) | {field: value}) + "\n" + "".join(rest))
    with pytest.raises(StudyError, match=message):
        resume(kept)
    assert not kept.sqlite_file.exists()


@pytest.mark.parametrize(("field", "value"), [("gates", []), ("seed", -1), ("trials", 200_000)])
def test_values_that_no_study_has_are_refused(kept, field, value):
    record = json.loads(kept.study_file.read_text())
    kept.study_file.write_text(json.dumps(record | {field: value}))
    with pytest.raises(StudyError, match=f"{field}.*study.json|study.json.*{field}"):
        resume(kept)


def test_a_study_that_was_kept_as_text_needs_its_own_recipe(kept):
    with pytest.raises(StudyError, match=r"study\.json is a study of multidigits, got celeba: give the"):
        resume(kept, recipe="celeba", settings=[])
    record = json.loads(kept.study_file.read_text())
    kept.study_file.write_text(json.dumps(record | {"experts": 5}))
    with pytest.raises(StudyError, match=r"experts is 5 in .*study.json, and multidigits gives 8"):
        resume(kept)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_study_of_the_command_line_leaves_no_file_open(tmp_path, monkeypatch):
    monkeypatch.setattr(_study, "train", lambda *_: None)
    gc.disable()  # it would close them some time later
    try:
        _study.run_study(options(tmp_path), workers=1, as_json=True)
        opened = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    finally:
        gc.enable()
    assert not [file for file in opened if file.startswith(str(tmp_path))]
