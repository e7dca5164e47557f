"""Studies whose command or workers are killed at random moments, again and again, end as if nothing was.

COMET_MOE_KILLS=50 kills each of the four 50 times, as the nightly run does. COMET_MOE_SEED moves the moments.
"""

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired

import optuna
import pytest
from command import succeed

from comet_moe.experiments.studies.storage import sqlite_url
from forked import Forked
from made_tables import customers, write_table

KILLS = int(os.environ.get("COMET_MOE_KILLS", 1))
SEED = int(os.environ.get("COMET_MOE_SEED", 0))
KILLS_PER_STUDY = 6
GATES = ("topk", "comet+")
TRIALS = 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(max(600, 240 * KILLS)),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc"),
]

PROGRAM = """
import multiprocessing
import sys
from pathlib import Path
import forked
from comet_moe.cli import main
from comet_moe.experiments.studies import pool

multiprocessing.current_process()._config["daemon"] = False  # else it may have no children
pids, *arguments = sys.argv[1:]
start = pool.WorkerPool._start_worker

def start_and_report(self):
    worker = start(self)
    pid = worker.process.pid
    with open(pids, "a") as file:
        print(pid, Path(f"/proc/{pid}/stat").read_text().split()[21], file=file)
    return worker

pool.multiprocessing = forked.Workers
pool.WorkerPool._start_worker = start_and_report
sys.argv = ["comet-moe", *arguments]
main()
"""


def tune(folder):
    sets = ("data.options.train_size=400", "data.options.validation_size=200", "data.options.test_size=200")
    sets += ("training.epochs=4", "training.batch_size=32", "training.threads=1")
    words = ("tune", "multidigits", "--trials", TRIALS, "--heartbeat", 1)
    return (*words, *(part for setting in sets for part in ("--set", setting)))


def compare(folder):
    table = folder.parent / "people.parquet"
    if not table.exists():
        write_table(customers(300), table)
    words = ("compare", table, "--targets", "spend", "--exclude", "customer_id", "--budget", "none")
    return (*words, "--seeds", TRIALS, "--set", "training.epochs=4", "--set", "training.threads=1")


def command(verb, folder):
    words = {"tune": tune, "compare": compare}[verb](folder)
    return (*words, "--gates", ",".join(GATES), "--workers", 2, "--out", folder, "--resume", "--json")


def without_changing(value):
    """Without times and names of processes; the rest of a result does not depend on them."""
    if isinstance(value, dict):
        changing = ("seconds", "predict_seconds", "worker", "attempts", "study", "page", "path", "name")
        return {key: without_changing(of) for key, of in value.items() if not key.startswith(changing)}
    return [without_changing(of) for of in value] if isinstance(value, list) else value


def outcome(folder, said):
    """What a study leaves: its trials, its table, what the command says, and the trials in its storage."""
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    url, counts = sqlite_url(folder / "study.sqlite"), {}
    for name in optuna.get_all_study_names(url):
        states = [trial.state.name for trial in optuna.load_study(study_name=name, storage=url).trials]
        counts[name.rpartition("/")[2]] = states.count("COMPLETE"), states.count("RUNNING")
    assert counts == dict.fromkeys(GATES, (TRIALS, 0))
    assert [trial["status"] for trial in trials] == ["complete"] * TRIALS * len(GATES)
    return without_changing([trials, succeed("table", folder, "--json").json, said])


@pytest.fixture(scope="module", params=["tune", "compare"])
def uninterrupted(request, tmp_path_factory):
    """The verb, the folder for its studies, its outcome, and how many seconds it took."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMET_MOE_CACHE", str(folder / "cache"))
        patch.setattr(optuna.logging, "_default_handler", None)
        started = time.monotonic()
        process = Forked("-c", PROGRAM, folder / "pids", *command(request.param, folder / "study"))
        out, err = process.communicate()
        seconds = time.monotonic() - started
        assert process.returncode == 0, err
        yield request.param, folder, outcome(folder / "study", json.loads(out)), seconds


def kill_worker(pids, rng):
    """Kill one of the workers that still run; False if there is none."""
    started = [line.split() for line in pids.read_text().splitlines()] if pids.exists() else []
    running = [int(pid) for pid, time_of_start in started if is_running(pid, time_of_start)]
    with suppress(ProcessLookupError):
        if running:
            os.kill(rng.choice(running), signal.SIGKILL)
            return True
    return False


def is_running(pid, time_of_start):
    """Whether the process still runs: its number may be another one's by now."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().split()
        return fields[2] != "Z" and fields[21] == time_of_start
    return False


def study_with_kills(verb, folder, target, rng, seconds, kills):
    """A study that is resumed until it is finished; what it says, and how often ``target`` was killed."""
    folder.mkdir()
    pids, killed = folder / "pids", 0
    while True:
        process = Forked("-c", PROGRAM, pids, *command(verb, folder / "study"))
        while process.poll() is None and killed < kills:
            with suppress(TimeoutExpired):
                process.communicate(timeout=rng.uniform(0, seconds))
            if process.poll() is None and target == "command":
                process.kill()
                killed += 1
                break
            if process.poll() is None:
                killed += kill_worker(pids, rng)
        out, err = process.communicate()
        assert "Traceback" not in err, err
        if process.returncode == 0:
            return json.loads(out), killed
        was_killed = process.returncode == -signal.SIGKILL
        assert was_killed or "workers ended without a result" in err, err


@pytest.mark.parametrize("target", ["command", "worker"])
def test_kills_at_random_moments_change_nothing(uninterrupted, target, tmp_path):
    verb, folder, wanted, seconds = uninterrupted
    rng, killed, number = random.Random(f"{SEED} {verb} {target}"), 0, 0
    while killed < KILLS:
        study = folder / f"{target}-{number}"
        kills, started = min(KILLS_PER_STUDY, KILLS - killed), time.monotonic()
        said, more = study_with_kills(verb, study, target, rng, seconds, kills)
        assert outcome(study / "study", said) == wanted, f"study {number} of COMET_MOE_SEED={SEED}"
        killed, number = killed + more, number + 1
        if not more:  # it was over before: the machine is less busy now
            seconds = min(seconds, time.monotonic() - started)
    print(f"{verb}: {killed} kills of the {target}, {number} studies")
