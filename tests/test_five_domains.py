"""The study of language models on five domains: runs that are killed, and the order of runs."""

import importlib
import json
import signal
import sys
from pathlib import Path

import pytest

from forked import Forked

pytest.importorskip("transformers")
pd = pytest.importorskip("pandas")

STUDY = Path(__file__).parents[1] / "docs" / "results" / "five_domains"
MODULES = ("corpus", "models", "plan", "run")
STEPS = 8

KILLED_WHILE_IT_SAVES = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import run, torch
from pathlib import Path

def save_half(state, path):
    whole = torch_save(state, path)
    if state["step"] == int(sys.argv[4]):
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

torch_save, torch.save, run.SAVE_EVERY = torch.save, save_half, 2
folder = Path(sys.argv[3])
corpus = run.load_corpus(Path(sys.argv[2]), folder, run.QUICK.vocabulary)
run.Training(run.Run("grown", 1e-2, 3.0, 8, 1), corpus, folder, run.QUICK).finish()
"""


@pytest.fixture(scope="module")
def study():
    """The modules of the study by name, and afterwards no more."""
    sys.path.insert(0, str(STUDY))
    yield {name: importlib.import_module(name) for name in MODULES}
    sys.path.remove(str(STUDY))
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Two domains of 40 short documents each."""
    path = tmp_path_factory.mktemp("text") / "text.parquet"
    words = {"cats": "the cat sat on a mat and saw cat {}. ", "code": "def f{}(x): return x + {} "}
    rows = [
        {"domain": domain, "document": str(i), "text": sentence.replace("{}", str(i)) * 20}
        for domain, sentence in words.items()
        for i in range(40)
    ]
    pd.DataFrame(rows).to_parquet(path)
    return path


@pytest.fixture
def training(study, text, tmp_path, monkeypatch):
    """A function that makes a run of a model that grows, from its start or its checkpoint in a folder."""
    run = study["run"]
    monkeypatch.setattr(run, "SAVE_EVERY", 2)

    def make(folder, model="grown"):
        corpus = run.load_corpus(text, folder, run.QUICK.vocabulary)
        return run.Training(study["plan"].Run(model, 1e-2, 3.0, STEPS, 1), corpus, folder, run.QUICK)

    return make


def without_times(record):
    return {name: value for name, value in record.items() if "cpu_second" not in name}


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 8])
def test_a_run_that_is_killed_while_it_saves_ends_with_the_same_record(step, text, training, tmp_path):
    expected = without_times(training(tmp_path / "whole").finish())
    killed = Forked("-c", KILLED_WHILE_IT_SAVES, STUDY, text, tmp_path / "killed", step)
    _, errors = killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL, errors
    resumed = training(tmp_path / "killed")
    assert resumed.step == step - 2
    assert without_times(resumed.finish()) == expected
    assert expected["layers"][0]["experts_per_sample"] > 0


@pytest.mark.slow
def test_a_model_that_grows_from_a_saved_dense_run_ends_with_the_same_record(training, tmp_path):
    expected = without_times(training(tmp_path / "alone").finish())
    training(tmp_path / "both", "dense").finish()
    grown = training(tmp_path / "both")
    assert grown.step == STEPS // 2
    assert without_times(grown.finish()) == expected


def record(run, loss):
    settings = {name: getattr(run, name) for name in ("model", "rate", "gate_factor", "steps", "seed")}
    return settings | {"validation": {"all": loss}}


@pytest.fixture
def rates_tried(study):
    """A function that gives the rates and factors a model tries, where ``loss(rate, factor)`` is its loss."""

    def tried(model, loss):
        records, tried = [], []
        while wanted := study["plan"].choose_rate(model, records, 30)[0]:
            run = wanted[0]
            tried.append((run.rate, run.gate_factor))
            records.append(record(run, loss(run.rate, run.gate_factor)))
        return tried, study["plan"].choose_rate(model, records, 30)[1]

    return tried


def test_the_best_rate_has_a_worse_one_on_either_side(rates_tried):
    tried, best = rates_tried("dense", lambda rate, factor: abs(rate - 4e-3))
    assert tried == [(2e-3, 1), (4e-3, 1), (8e-3, 1)]
    assert best.rate == 4e-3


def test_the_rate_of_a_gate_is_tried_at_the_best_rate_of_the_model(rates_tried):
    tried, best = rates_tried("topk", lambda rate, factor: abs(rate - 1e-3) - factor)
    assert tried == [(2e-3, 1), (4e-3, 1), (1e-3, 1), (5e-4, 1), (1e-3, 3)]
    assert (best.rate, best.gate_factor) == (1e-3, 3)


def test_a_diverged_run_is_not_the_best(rates_tried):
    _, best = rates_tried("relu", lambda rate, factor: None if rate > 1e-3 else 1 - rate)
    assert best.rate == 1e-3


def test_all_models_end_with_three_seeds_and_no_run_is_asked_for_twice(study):
    plan = study["plan"]
    records, names = [], []
    while runs := plan.next_runs(records, 30):
        names.append(runs[0].name)
        records.append(record(runs[0], abs(runs[0].rate - 2e-3)))
    assert len(set(names)) == len(names)
    for model in study["models"].MODELS:
        assert sorted(one["seed"] for one in plan.find(records, model=model, steps=30)) == [1, 2, 3]


def test_runs_in_the_committed_file_are_not_repeated(study, tmp_path):
    plan, run = study["plan"], study["run"]
    first = plan.next_runs([])[0]
    record = {"model": first.model, "rate": first.rate, "gate_factor": first.gate_factor}
    record |= {"steps": first.steps, "seed": first.seed, "validation": {"all": 3.0}}
    committed = tmp_path / "runs.jsonl"
    committed.write_text(json.dumps({"run": first.name, "result": record}) + "\n")
    folder = tmp_path / "runs"
    folder.mkdir()

    run.unpack_records(committed, folder)

    assert first not in plan.next_runs(run.read_records(folder))
