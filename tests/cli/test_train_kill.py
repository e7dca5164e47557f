"""A run that is killed at any moments ends like one that was not interrupted."""

import json
import random
import signal
import time

import pytest

from forked import Forked

SETTINGS = [
    *("gate=comet+", "search.epochs=3", "training.epochs=6", "training.batch_size=64", "training.threads=1"),
    *("data.options.train_size=600", "data.options.validation_size=200", "data.options.test_size=200"),
]
KILLS = 3


def start(out, *arguments):
    sets = [part for setting in SETTINGS for part in ("--set", setting)]
    return Forked("train", "multidigits", *sets, "--out", out, *arguments)


def finish(process):
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out)


def lines(path):
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.slow
def test_a_run_killed_at_random_moments_gives_the_same_result_and_the_same_weights(tmp_path):
    whole = finish(start(tmp_path / "whole", "--json"))
    out, moments = tmp_path / "killed", random.Random(0)
    kills = 0
    while kills < KILLS:
        process = start(out, "--resume")
        # After one more epoch than before, so that each process gets further; then anywhere in the next one.
        further = lines(out / "metrics.jsonl") + 1
        while lines(out / "metrics.jsonl") < further and process.poll() is None:
            time.sleep(0.002)
        time.sleep(moments.random() * 0.1)
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        if process.returncode == 0:
            break
    assert kills > 1
    # Files that a kill in the middle of writing leaves are ignored and removed.
    (out / ".result.json.0123456789abcdef.tmp").write_text("{")
    (out / "checkpoint" / ".state.safetensors.0123456789abcdef.tmp").write_bytes(b"half")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 9, "train_l')
    (out / "result.json").unlink(missing_ok=True)
    resumed = finish(start(out, "--resume", "--json"))
    assert {**resumed, "seconds": 0} == {**whole, "seconds": 0}
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]
    assert lines(out / "metrics.jsonl") == lines(tmp_path / "whole" / "metrics.jsonl") == whole["epochs"]
    assert not [path for path in out.rglob(".*") if path.is_file()]


@pytest.mark.slow
def test_ctrl_c_says_how_to_resume(tmp_path):
    out = tmp_path / "run"
    process = start(out, "--set", "training.epochs=500")
    while lines(out / "metrics.jsonl") < 1 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert f"comet-moe train multidigits --out {out} --resume" in err
    assert "Traceback" not in err
