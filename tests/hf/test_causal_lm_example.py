"""The example that trains a causal mixture on a text."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "causal_lm.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, cwd=SCRIPT.parent
    )


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["dense", "topk", "hash+"])
def test_the_example_learns_and_reports_routing(gate, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The cat sat on the mat.\nA dog ran under the tree!\n" * 200)
    done = run("--data", text, "--gate", gate, "--quick", "--steps", "15", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["validation_loss"] < 5.2  # log 256 is 5.55
    assert result["tokens_per_second"] > 0
    if gate == "dense":
        assert "information" not in result
    else:
        assert result["experts_per_sample"] == {"topk": 2, "hash+": 1}[gate]
        assert 1 <= result["load_ratio"] <= 8
        for layer in result["specialisation"]:
            assert sum(layer["lower"]) == pytest.approx(1)


def test_a_missing_text_is_named():
    done = run("--data", "nowhere.txt")
    assert done.returncode == 2
    assert done.stderr.endswith("there is no file nowhere.txt: give a text with --data\n")
