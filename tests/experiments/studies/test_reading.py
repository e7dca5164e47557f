"""Folders are read as studies; an error in a file is one sentence that names it."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pandas as pd
import pytest
import yaml
from made_studies import made_study, random_trials, trial, waiting, write_study

from comet_moe.exceptions import StudyError
from comet_moe.experiments.studies.reading import COLUMNS, METRIC_COLUMNS, read_studies


def write_run(folder, gate="comet", seed=0, alpha=None, experts=8, test=20.0, recipe="multidigits"):
    """Write the files of a run that are read; without a loss the run is not finished."""
    folder.mkdir(parents=True)
    config = {"recipe": recipe, "seed": seed, "gate": {"name": gate}, "model": {"experts": experts}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"loss": {"alpha": alpha}}))
    if test is not None:
        result = {"status": "complete", "validation_loss": test - 1, "test_loss": test, "seconds": 3.5}
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def error_of(*paths):
    with pytest.raises(StudyError) as error:
        read_studies(list(paths))
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


def test_a_study_has_one_row_per_trial_and_the_documented_columns(tmp_path):
    folder = write_study(tmp_path / "s", random_trials(["topk", "comet"], 5, failed=1), alpha=0.9)
    (folder / "runs" / "comet-003").mkdir(parents=True)
    (study,) = read_studies([folder])
    assert (study.kind, study.name, study.recipe) == ("tuning", "made", "multidigits")
    assert (study.gates, study.trials_per_gate, study.experts, study.alpha) == (["topk", "comet"], 5, 8, 0.9)
    assert study.title == "made (alpha=0.9)"
    assert tuple(study.trials.columns) == COLUMNS
    assert all(study.trials[name].dtype == float for name in METRIC_COLUMNS)
    assert list(study.trials_of("comet")["index"]) == [0, 1, 2, 3, 4]
    assert list(study.trials_of("comet")["status"]) == ["complete"] * 4 + ["failed"]
    assert study.trials.iloc[0]["params"] == {"training.learning_rate": 3e-4, "seed": 0}
    runs = list(study.trials_of("comet")["run"])
    assert runs == [None, None, None, folder / "runs" / "comet-003", None]
    assert (study.num_unfinished, study.left_out()) == (0, [])


def test_made_studies_of_other_tests_equal_studies_that_are_read(tmp_path):
    lines = list(random_trials(["topk", "comet"], 5, failed=1))
    (read,), made = read_studies([write_study(tmp_path, lines)]), made_study(lines)
    pd.testing.assert_frame_equal(read.trials, made.trials)
    for field in fields(read):
        if field.name not in ("path", "trials"):
            assert getattr(read, field.name) == getattr(made, field.name)


def test_a_trial_without_finite_losses_counts_as_failed(tmp_path):
    lines = [trial("comet", 0, 1.0, 2.0), *(trial("comet", i, 1.0, 2.0) for i in (1, 2, 3))]
    lines[1]["test_loss"], lines[2]["test_loss"], lines[3]["validation_loss"] = None, float("nan"), 1e999
    (study,) = read_studies([write_study(tmp_path / "s", lines)])
    assert list(study.trials["status"]) == ["complete", "failed", "failed", "failed"]
    assert list(study.trials["reason"])[1:] == [
        "test_loss is None",
        "test_loss is nan",
        "validation_loss is inf",
    ]
    assert study.trials["validation_loss"].isna().tolist() == [False, True, True, True]


def test_unfinished_trials_are_counted(tmp_path):
    lines = [trial("comet", 0, 1.0, 2.0), trial("comet", 1, None, None), waiting("comet", 2)]
    (study,) = read_studies([write_study(tmp_path / "s", lines, trials=5)])
    assert study.num_unfinished == 3
    assert study.left_out() == ["made: 3 of 5 trials are unfinished and not included"]


@pytest.mark.parametrize(("name", "gates", "trials"), [("ablation", 6, 180), ("multidigits", 5, 300)])
def test_the_studies_of_the_documentation_are_read(name, gates, trials):
    (study,) = read_studies([Path(__file__).parents[3] / "docs" / "results" / name])
    assert (len(study.gates), len(study.trials), study.num_unfinished) == (gates, trials, 0)


def test_studies_keep_their_order_and_a_path_given_twice_counts_once(tmp_path):
    a, b = (write_study(tmp_path / name, random_trials(["comet"], 2), name=name) for name in "ab")
    assert [study.name for study in read_studies([b, a, tmp_path / "a" / ".." / "b"])] == ["b", "a"]


def test_plain_runs_are_grouped_by_recipe_and_task_weight(tmp_path):
    write_run(tmp_path / "x2", "comet+", seed=1, alpha=0.9)
    write_run(tmp_path / "x1", "comet+", seed=2, alpha=0.9, experts=16)
    write_run(tmp_path / "x3", "hash", alpha=0.9, test=None)
    write_run(tmp_path / "x4", "hash", alpha=0.1)
    write_run(tmp_path / "x5", "softmax", recipe="digits")
    (tmp_path / "notes").mkdir()
    nine, one, digits = read_studies([tmp_path, tmp_path / "x4"])
    assert (nine.kind, nine.recipe, nine.alpha, nine.experts, nine.trials_per_gate) == (
        "runs",
        "multidigits",
        0.9,
        None,
        2,
    )
    assert nine.gates == ["hash", "comet+"]  # in the order of the paper
    assert [path.name for path in nine.trials_of("comet+")["run"]] == ["x2", "x1"]  # by seed
    assert [params["seed"] for params in nine.trials_of("comet+")["params"]] == [1, 2]
    assert list(nine.trials["status"]) == ["running", "complete", "complete"]
    assert nine.num_unfinished == 1
    assert (one.alpha, len(one.trials)) == (0.1, 1)
    assert (digits.recipe, digits.alpha, digits.experts) == ("digits", None, 8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-40], "line 3 of {}/trials.jsonl is not JSON"),
        (
            lambda text: text.replace('"index": 1', '"index": 0'),
            "line 2 of {}/trials.jsonl repeats trial 0 of comet",
        ),
        (
            lambda text: text.replace('"index": 2', '"index": 7'),
            "line 3 of {}/trials.jsonl has index 7, and study.json has 3 trials",
        ),
        (lambda text: text.replace("comet", "topk", 1), "line 1 of {}/trials.jsonl has gate 'topk'"),
        (lambda text: text.replace("complete", "done", 1), "line 1 of {}/trials.jsonl is not valid (status:"),
        (lambda text: text.replace('"gate"', '"door"', 1), "(gate: Field required)"),
        (lambda text: "[]\n" + text, "line 1 of {}/trials.jsonl is not valid"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, damage, message):
    folder = write_study(tmp_path / "s", random_trials(["comet"], 3))
    lines = folder / "trials.jsonl"
    lines.write_text(damage(lines.read_text()))
    assert message.format(folder) in error_of(folder)


def test_a_folder_without_a_study_or_run_is_refused(tmp_path):
    assert "is not a folder: give the folder of a study" in error_of(tmp_path / "none")
    assert "has neither a study (study.json) nor runs (config.yaml)" in error_of(tmp_path)
    folder = write_study(tmp_path / "s", random_trials(["comet"], 3))
    (folder / "trials.jsonl").unlink()
    assert "has no trials.jsonl" in error_of(folder)
    (folder / "study.json").write_text('{"kind": "tuning"')
    assert "study.json is not JSON" in error_of(folder)
    (folder / "study.json").write_bytes(b"\xff")
    assert "study.json cannot be read" in error_of(folder)
    run = write_run(tmp_path / "r")
    (run / "result.json").write_text('{"status": "complete", "test_loss": "low"}')
    assert "test_loss: Input should be a valid number" in error_of(run)
    (run / "config.yaml").write_text("a: [")
    assert "config.yaml is not YAML" in error_of(run)
    (run / "config.yaml").write_text("")
    assert "config.yaml is not valid" in error_of(run)


@pytest.mark.slow
def test_analysis_does_not_import_torch():
    names = ("reading", "tables", "text_tables", "winner", "loss_by_trials", "pool")
    imports = ", ".join(f"comet_moe.experiments.studies.{name}" for name in names)
    unwanted = "{'torch', 'optuna', 'comet_moe.experiments.models', 'comet_moe.experiments.studies.storage'}"
    code = f"import sys, {imports}; print(sorted({unwanted} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
