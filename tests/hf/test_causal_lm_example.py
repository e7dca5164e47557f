"""The example that trains a causal mixture on a text."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "causal_lm.py"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the example as a script in this process; what it printed."""

    def run_script(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return capsys.readouterr().out

    return run_script


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The cat sat on the mat.\nA dog ran under the tree!\n" * 200)
    return path


@pytest.mark.parametrize("gate", ["dense", "topk", "hash+"])
def test_the_example_learns_and_reports_routing(gate, text, run):
    settings = ("--gate", gate, "--lr", "2e-3", "--quick", "--steps", "15", "--json")
    result = json.loads(run("--data", text, *settings))
    assert result["validation_loss"] < 5.2  # log 256 is 5.55
    assert result["tokens_per_second"] > 0
    if gate == "dense":
        assert "information" not in result
    else:
        assert result["experts_per_sample"] == {"topk": 2, "hash+": 1}[gate]
        assert 1 <= result["load_ratio"] <= 8
        for layer in result["specialisation"]:
            assert sum(layer["lower"]) == pytest.approx(1)


def test_settings_of_the_gate_reach_it_and_the_result_is_readable(text, run):
    printed = run("--data", text, "--gate", "topk+", "--set", "noise=true", "--quick", "--steps", "2")
    assert "validation_loss" in printed
    assert "layer 1: share of each expert in a class of bytes" in printed


def test_a_missing_text_is_named(run, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("--data", "nowhere.txt")
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith("there is no file nowhere.txt: give a text with --data\n")


def test_a_dense_model_grows_in_the_middle_of_the_run(text, run):
    settings = (
        "--gate",
        "hash",
        "--grow-at",
        "0.5",
        "--gate-lr",
        "0.01",
        "--quick",
        "--steps",
        "10",
        "--json",
    )
    result = json.loads(run("--data", text, *settings))
    assert result["experts_per_sample"] == 1
    assert result["verdicts"] == ["routes", "routes"]


@pytest.mark.parametrize("gate", [("--gate", "dense"), ()])
def test_a_share_of_the_steps_that_cannot_be_is_refused(gate, text, run, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("--data", text, "--grow-at", "0.5" if gate else "1.5", *gate)
    assert stopped.value.code == 2
    assert "--grow-at must be between 0 and 1, with a gate" in capsys.readouterr().err
