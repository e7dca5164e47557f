"""Every example runs with --quick, in this process where it can."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from made_tables import customers, write_table

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run an example as a script in this process; what it printed."""
    monkeypatch.chdir(tmp_path)

    def run_script(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments), "--quick"])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_script


@pytest.mark.parametrize("gate", ["comet", "topk"])
def test_own_model(run, gate):
    printed = run("own_model.py", "--gate", gate)
    losses = [float(loss) for loss in re.findall(r"test loss ([\d.]+)", printed)]
    assert len(losses) == 2
    assert max(losses) < 2.5  # the variance of the target is about 2.25
    assert re.search(r"gate 0\.gates\.0: routes, [\d.]+ experts per sample", printed)


def test_multi_task_table(run, tmp_path):
    assert re.findall(r"^(\w+) .*bought 0\.\d+, spend", run("multi_task_table.py"), re.MULTILINE) == [
        "dense",
        "softmax",
        "comet",
    ]


def test_vision(run):
    printed = run("vision.py")
    digit, inverted = (float(value) for value in re.findall(r"accuracy ([\d.]+)", printed))
    assert digit > 0.2  # ten classes
    assert inverted > 0.8
    for row in re.findall(r"^  (?:plain|inverted) +([\d. ]+)$", printed, re.MULTILINE):
        assert sum(map(float, row.split())) == pytest.approx(1, abs=0.04)  # six shares of two decimals


@pytest.mark.slow
def test_own_gate_in_train_compare_an_estimator_and_a_model_of_transformers(run):
    pytest.importorskip("transformers")
    printed = run("own_gate.py")
    assert "keeps every law" in printed
    assert float(re.search(r"accuracy ([\d.]+)", printed)[1]) > 0.6  # three classes
    assert "computes the same: True" in printed
    assert re.search(r"train: nearest\+ has a test loss of \d", printed)
    assert re.search(r"compare: test losses {'dense': [\d.]+, 'nearest': [\d.]+}", printed)


def test_idle_router(run, tmp_path):
    pytest.importorskip("transformers")
    run("idle_router.py")  # tests/test_readme.py audits what it writes
    assert {path.name for path in tmp_path.iterdir()} == {"model", "texts.txt"}


def test_bert_student(run):
    pytest.importorskip("transformers")
    assert re.search(r"agrees with the teacher on [\d.]+ % of the rows", run("bert_student.py"))


def test_bert_student_without_a_model_says_what_to_give(monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", ["bert_student.py"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / "bert_student.py"), run_name="__main__")
    assert "give a fine-tuned model with --model" in capsys.readouterr().err


def test_parallel_in_a_group_of_one(run, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.get(name, "0"))
    assert re.search(r"1 processes, 8 experts on each, loss [\d.]+", run("parallel.py"))
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_parallel_on_two_processes(tmp_path):
    import os
    import subprocess

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "parallel.py"), "--quick"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes, 4 experts on each" in done.stdout


@pytest.mark.slow
def test_tune_on_postgres(monkeypatch, tmp_path, capfd):
    import os

    pytest.importorskip("optuna")
    storage = os.environ.get("COMET_MOE_TEST_POSTGRES", "sqlite")
    write_table(customers(200), tmp_path / "my.csv")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMET_MOE_CACHE", str(tmp_path / "cache"))
    folder = f"studies/example-{os.getpid()}"  # the name of the study in the storage
    arguments = [storage, "--data", "my.csv", "--targets", "bought", "--out", folder, "--quick"]
    monkeypatch.setattr(sys, "argv", ["tune_on_postgres.py", *arguments])
    runpy.run_path(str(EXAMPLES / "tune_on_postgres.py"), run_name="__main__")
    printed = capfd.readouterr().out
    assert "dense" in printed
    assert "comet" in printed


def test_every_example_is_listed_and_has_a_test():
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    tests = "".join(
        path.read_text(encoding="utf-8") for path in Path(__file__).parent.rglob("test_*example*.py")
    )
    for path in EXAMPLES.glob("*.py"):
        assert f"]({path.name})" in listed
        assert path.name in tests
