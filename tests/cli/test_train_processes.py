"""Two processes of torchrun train like one process with the same batches, and only one of them writes."""

import json
import os
import socket
import subprocess
import sys

import pytest
from command import succeed
from raw_sets import prepare, sets
from safetensors.torch import load_file

# Batches of 61 rows do not split evenly over two processes. Without dropout, whose noise is different in each
# process, the two runs differ by rounding only.
SETTINGS = ["training.epochs=3", "training.batch_size=61", "training.threads=1", "model.dropout=0"]


def torchrun(*arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
        "-m",
        "comet_moe",
        *map(str, arguments),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    # Each process rounds its own share of a gradient to bfloat16, which has 2**-8.
    ("gate", "precision", "tolerance"),
    [("comet+", "float32", 1e-4), ("topk", "float32", 1e-4), ("comet+", "bfloat16", 2**-8)],
)
def test_two_processes_have_the_loss_of_one(gate, precision, tolerance, tmp_path):
    prepare("movielens-100k", tmp_path / "raw")
    of_run = [f"gate={gate}", f"training.precision={precision}", "search.epochs=2"]
    settings = sets([*SETTINGS, *of_run, "training.learning_rate=1e-3"])
    one = succeed("train", "movielens-100k", *settings, "--out", tmp_path / "one", "--json").json
    done = torchrun("train", "movielens-100k", *settings, "--out", tmp_path / "two", "--json")
    assert done.returncode == 0, done.stderr
    two = json.loads(done.stdout)  # one object: only the first process says anything
    assert two["test_loss"] == pytest.approx(one["test_loss"], rel=tolerance)
    assert two["validation_loss"] == pytest.approx(one["validation_loss"], rel=tolerance)
    assert two["epochs"] == one["epochs"] == 3
    assert done.stderr.count("epoch 3/3") == 1
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert first.keys() == second.keys()
    orders = [name for name in first if name.endswith("search.fixed")]
    assert len(orders) == (gate == "comet+")
    assert all(first[name].equal(second[name]) for name in orders)
    for name in ("one", "two"):
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [record["epoch"] for record in records] == [1, 2, 3]
    facts = json.loads((tmp_path / "two" / "environment.json").read_text())
    assert facts[0]["processes"] == 2


@pytest.mark.slow
def test_a_mistake_ends_all_processes_with_one_sentence(tmp_path):
    done = torchrun("train", "movielens-100k", *sets(SETTINGS), "--out", tmp_path / "run")
    assert done.returncode != 0
    message = [line for line in done.stderr.splitlines() if line.startswith("comet-moe:")]
    assert len(message) == 1
    assert "movielens-100k" in message[0]
    assert not (tmp_path / "run").exists()
