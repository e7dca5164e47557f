"""Settings, pages and commands that were nearly right, and what the library says on the command line."""

import os
import warnings

import pytest
from command import comet_moe, succeed
from outcomes import SMALL, refuse, sets

from comet_moe import cli
from comet_moe.cli import _study, app
from comet_moe.devices import SlowPrecisionWarning
from comet_moe.exceptions import IdleGateWarning, RecipeError, StudyError, warnings_in_a_line
from comet_moe.experiments.config.loader import load_train_config
from comet_moe.experiments.studies.definition import StudyOptions
from comet_moe.experiments.studies.study import open_study


@pytest.mark.parametrize("text", ["1", "0", "yes please", "1.0", "[]"])
@pytest.mark.parametrize("key", ["data.any_size", "training.sparse_embeddings", "gates.topk.noise"])
def test_a_switch_is_true_or_false(key, text):
    with pytest.raises(RecipeError, match=rf"{key.rpartition('.')[2]}.* true or false, got"):
        load_train_config("movielens", ["gate=topk", f"{key}={text}"])


@pytest.mark.parametrize("text", ["", "x", "multidigits"])
def test_the_recipe_is_no_setting(text):
    with pytest.raises(RecipeError, match="recipe is the argument of the command and no setting"):
        load_train_config("multidigits", [f"recipe={text}"])


def test_the_pictures_of_a_benchmark_need_a_folder_before_it_measures(tmp_path):
    (tmp_path / "gate.svg").touch()
    refuse("bench", "gate", "--svg", tmp_path / "gate.svg", says="name a folder")


def test_a_rating_beyond_float32_is_named_and_nothing_else_said(tmp_path):
    rows = "".join(f"u{i % 7},i{i % 11},{1e308 if i == 40 else 3}\n" for i in range(99))
    (tmp_path / "ratings.csv").write_text(f"user,item,rating\n{rows}")
    settings = sets([f"data.path={tmp_path / 'ratings.csv'}"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refuse("train", "ratings", *settings, "--out", tmp_path / "run", says="has '1e+308' in column rating")


def test_a_report_replaces_no_file_of_its_run(tmp_path):
    run = tmp_path / "run"
    succeed("train", "multidigits", *sets(SMALL), "--set", "training.epochs=1", "--out", run)
    files = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    for file in files:
        refuse("report", run, "-o", file, says="must end in .html")
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == files


def test_an_interrupted_study_is_resumed_by_the_command_that_it_prints(tmp_path, monkeypatch):
    out = tmp_path / "study"
    options = StudyOptions(kind="ablation", recipe="multidigits", out=out, gates=["topk"], trials=1)
    with open_study(options):
        pass

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_study, "train", interrupt)
    done = comet_moe("ablate", "multidigits", "--out", out, "--add-gates", "dense", "--only-gates", "dense")
    assert done.code == 130
    command = f"comet-moe ablate multidigits --out {out} --resume --add-gates dense --only-gates dense"
    assert done.err == f"stopped: resume with `{command}`\n"
    trained = []
    monkeypatch.setattr(_study, "train", lambda study, workers, only: trained.append((study, only)))
    succeed(*command.split()[1:])
    ((study, only),) = trained
    assert (study.definition.gates, only) == (["topk", "dense"], ["dense"])
    with pytest.raises(StudyError, match="dense is in the saved study already"):
        open_study(StudyOptions(kind="ablation", recipe="multidigits", out=out, add_gates=["dense"]))


@pytest.mark.parametrize("kind", [IdleGateWarning, SlowPrecisionWarning])
def test_warnings_of_the_library_have_no_file_and_line_on_the_command_line(kind, monkeypatch):
    shown = []
    monkeypatch.setattr(app, "run", lambda: shown.append(warnings.formatwarning("told", kind, "a.py", 3)))
    comet_moe("--version")
    assert shown == ["warning: told\n"]
    assert warnings.formatwarning("told", kind, "a.py", 3) != "warning: told\n"


def test_warnings_without_a_class_of_their_own_are_known_by_their_file():
    with warnings_in_a_line():
        ours = warnings.formatwarning("told", RuntimeWarning, os.path.join(cli.__path__[0], "app.py"), 3)
        others = warnings.formatwarning("told", RuntimeWarning, "numpy.py", 3)
    assert ours == "warning: told\n"
    assert others.startswith("numpy.py:3: RuntimeWarning: told")
