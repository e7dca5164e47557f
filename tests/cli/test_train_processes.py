"""Processes of torchrun train like one process with the same batches, and only one of them writes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import succeed
from raw_sets import prepare, sets
from safetensors.torch import load_file

from forked import Forked

pytestmark = pytest.mark.slow

# Batches of 61 rows do not split evenly over two processes. Without dropout, whose noise is different in each
# process, the two runs differ by rounding only.
SETTINGS = [
    *("training.epochs=3", "training.batch_size=61", "training.threads=1", "training.learning_rate=1e-3"),
    *("model.dropout=0", "search.epochs=2"),
]
SPREAD = [*SETTINGS, "gate=topk+", "gate.load_balance=0.1", "parallel.experts=2"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start_torchrun(*arguments, options=()):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
    command += ["--master-addr", "127.0.0.1", "--master-port", free_port(), "-m", "comet_moe"]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def finish(process):
    """Exit code, standard output and standard error; no process is left behind."""
    try:
        out, err = process.communicate()
    finally:
        process.kill()
    return process.returncode, out, err


def run_ranks(*arguments, settings=((), ())):
    """As torchrun does it, without the time that the starts take; ``settings`` are those of each rank.

    Exit codes, and the outputs of both ranks together.
    """
    port, started = free_port(), []
    for rank in range(2):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        started.append(Forked(*arguments, *sets(settings[rank]), env=environment))
    try:
        codes, outs, errs = zip(*(finish(process) for process in started), strict=True)
    finally:
        for process in started:
            process.kill()
    return list(codes), "".join(outs), "".join(errs)


def messages(err):
    return [line for line in err.splitlines() if line.startswith("comet-moe:")]


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """A folder with the prepared data, and a run in it whose experts were spread over two processes."""
    folder = tmp_path_factory.mktemp("spread")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMET_MOE_CACHE", str(folder / "cache"))
        prepare("movielens-100k", folder / "raw")
        codes, _, err = run_ranks("train", "movielens-100k", *sets(SPREAD), "--out", folder / "two")
    assert codes == [0, 0], err
    return folder


@pytest.mark.parametrize(
    # Each process rounds its own share of a gradient to bfloat16, which has 2**-8.
    ("precision", "tolerance"),
    [("float32", 1e-4), ("bfloat16", 2**-8)],
)
def test_two_processes_have_the_loss_of_one(precision, tolerance, tmp_path):
    prepare("movielens-100k", tmp_path / "raw")
    settings = sets([*SETTINGS, "gate=comet+", f"training.precision={precision}"])
    one = succeed("train", "movielens-100k", *settings, "--out", tmp_path / "one", "--json").json
    codes, out, err = run_ranks("train", "movielens-100k", *settings, "--out", tmp_path / "two", "--json")
    assert codes == [0, 0], err
    two = json.loads(out)  # one object: only the first process says anything
    assert two["test_loss"] == pytest.approx(one["test_loss"], rel=tolerance)
    assert two["validation_loss"] == pytest.approx(one["validation_loss"], rel=tolerance)
    assert two["epochs"] == one["epochs"] == 3
    assert err.count("epoch 3/3") == 1
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert first.keys() == second.keys()
    (order,) = [name for name in first if name.endswith("search.fixed")]
    assert first[order].equal(second[order])
    for name in ("one", "two"):
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [record["epoch"] for record in records] == [1, 2, 3]
    facts = json.loads((tmp_path / "two" / "environment.json").read_text())
    assert facts[0]["processes"] == 2


def test_spread_experts_have_the_loss_of_one_process_which_can_use_the_run(spread, monkeypatch, tmp_path):
    monkeypatch.setenv("COMET_MOE_CACHE", str(spread / "cache"))
    settings = sets([*SPREAD, "parallel.experts=1"])
    one = succeed("train", "movielens-100k", *settings, "--out", tmp_path / "one", "--json").json
    two = json.loads((spread / "two" / "result.json").read_text())
    assert two["test_loss"] == pytest.approx(one["test_loss"], rel=1e-4)
    assert two["parameters"] == one["parameters"]
    again = succeed("evaluate", spread / "two", "--json").json
    assert again["test_loss"] == pytest.approx(two["test_loss"], rel=1e-6)
    succeed("export", spread / "two", "-o", tmp_path / "model.onnx")
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("user,item\n1,1\n")
    succeed("predict", spread / "two", pairs, "-o", tmp_path / "predictions.csv")


def test_a_killed_rank_is_named_and_torchrun_restarts_to_the_same_result(spread, monkeypatch, tmp_path):
    monkeypatch.setenv("COMET_MOE_CACHE", str(spread / "cache"))
    run = tmp_path / "run"
    process = start_torchrun(
        "train", "movielens-100k", *sets(SPREAD), "--out", run, options=["--max-restarts", "1"]
    )
    try:
        wait_until(lambda: (run / "checkpoint" / "state.safetensors").exists())
        os.kill(pid_of_rank(1, process.pid), signal.SIGKILL)
        wait_until(lambda: not is_running(process.pid, attempt=0))
    finally:
        code, _, err = finish(process)
    assert code == 0, err
    assert "exitcode: -9) local_rank: 1 " in err  # torchrun says which rank it was
    assert all("lost its connection to another rank" in message for message in messages(err))
    uninterrupted, result = (
        json.loads((folder / "result.json").read_text()) for folder in (spread / "two", run)
    )
    assert result["test_loss"] == uninterrupted["test_loss"]
    first, second = (load_file(folder / "model.safetensors") for folder in (spread / "two", run))
    assert all(first[name].equal(second[name]) for name in first)


def test_no_thread_or_signal_handler_of_ours_can_end_a_rank_that_is_busy():
    """A call that holds the interpreter for long, such as a compilation, is not a lost rank."""
    code = (
        "import signal, threading\n"
        "from comet_moe.experiments.training.distributed import join_processes\n"
        "with join_processes() as processes:\n"
        "    assert processes.size == 2\n"
        "    assert threading.enumerate() == [threading.main_thread()]\n"
        "    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
    )
    codes, _, err = run_ranks("-c", code)
    assert codes == [0, 0], err


def test_a_rank_whose_peer_is_gone_says_so_in_one_sentence():
    code = (
        "import os\n"
        "from comet_moe.exceptions import RunError\n"
        "from comet_moe.experiments.training.distributed import join_processes\n"
        "try:\n"
        "    with join_processes() as processes:\n"
        "        processes.on_main(lambda: None)\n"
        "        if processes.rank == 1:\n"
        "            os._exit(0)\n"
        "        processes.require_same({}, 'advice')\n"
        "except RunError as error:\n"
        "    print(error)\n"
    )
    codes, out, err = run_ranks("-c", code)
    assert codes == [0, 0], err
    assert out.startswith("rank 0 of 2 lost its connection to another rank"), err


def wait_until(is_true):
    while not is_true():  # the limit is that of a test
        time.sleep(0.05)


def environments(parent):
    """The environment variables of the child processes of ``parent``, by process id."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"PPid:\t{parent}\n" in (folder / "status").read_text():
                pairs = (folder / "environ").read_text().split("\0")
                found[int(folder.name)] = dict(pair.partition("=")[::2] for pair in pairs)
        except OSError:  # it has ended
            continue
    return found


def pid_of_rank(rank, parent):
    (pid,) = [pid for pid, variables in environments(parent).items() if variables.get("RANK") == str(rank)]
    return pid


def is_running(parent, attempt):
    """Whether a rank of this attempt of torchrun is left."""
    counts = [variables.get("TORCHELASTIC_RESTART_COUNT") for variables in environments(parent).values()]
    return str(attempt) in counts


def test_a_rank_with_other_settings_is_refused(spread, monkeypatch, tmp_path):
    monkeypatch.setenv("COMET_MOE_CACHE", str(spread / "cache"))
    codes, _, err = run_ranks(
        *("train", "movielens-100k", *sets(SETTINGS[:-1]), "--out", tmp_path / "run"),
        settings=[[f"training.learning_rate={1 + rank}e-3"] for rank in range(2)],
    )
    assert codes == [2, 2]
    (message,) = messages(err)
    assert "training.learning_rate is 2e-3 on rank 1 and 1e-3 on rank 0: start all ranks" in message
    assert not (tmp_path / "run").exists()


def test_a_mistake_ends_all_processes_with_one_sentence(tmp_path):
    codes, _, err = run_ranks("train", "movielens-100k", *sets(SETTINGS), "--out", tmp_path / "run")
    assert codes == [2, 2]
    (message,) = messages(err)
    assert "movielens-100k" in message
    assert not (tmp_path / "run").exists()
