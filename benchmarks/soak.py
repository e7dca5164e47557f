"""Do memory, open files, threads or disk grow, do processes stay behind? See docs/reliability.md.

    python -m benchmarks.soak tune --minutes 60      # a study with two workers; then kill -9 of its parent
    python -m benchmarks.soak postgres --minutes 60  # the same on PostgreSQL, restarted every five minutes
    python -m benchmarks.soak compare --minutes 60   # `comet-moe compare` again and again in one process
    python -m benchmarks.soak audits --minutes 60    # training with a RoutingMonitor and audits
    python -m benchmarks.soak calls --count 100000   # predictions of one loaded model in one process
    python -m benchmarks.soak steps --count 10000    # training steps with a RoutingMonitor

Each prints one JSON object and exits with code 1 where a limit is exceeded. Linux only: it reads /proc.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.postgres import Cluster
from benchmarks.processes import Samples, children, disk, is_alive

MAX_GROWTH = 1.0
"""Growth of memory and disk in percent. The memory of a study is measured by its slope per hour."""

RESTART_SECONDS = 300
SAMPLE_SECONDS = 5

TRIAL = (
    *("data.options.train_size=1000", "data.options.validation_size=200", "data.options.test_size=200"),
    *("training.epochs=10", "training.patience=10", "model.filters=[4]", "model.units=[8]"),
)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for all that this process and its children write, temporary files and the cache included."""
    before = dict(os.environ)
    with TemporaryDirectory(prefix="soak-") as folder:
        for name in ("temporary", "cache"):
            Path(folder, name).mkdir()
        os.environ |= {"TMPDIR": f"{folder}/temporary", "COMET_MOE_CACHE": f"{folder}/cache"}
        os.environ["OMP_NUM_THREADS"] = "1"
        tempfile.tempdir = None  # it is read again
        try:
            yield Path(folder)
        finally:
            os.environ.clear()
            os.environ.update(before)
            tempfile.tempdir = None


@contextmanager
def tiny_run() -> Iterator[Path]:
    """The folder of a run of one epoch."""
    with scratch_folder() as scratch:
        command = [sys.executable, "-m", "comet_moe", "train", "multidigits", "--out", f"{scratch}/run"]
        settings = [part for setting in (*TRIAL, "training.epochs=1") for part in ("--set", setting)]
        subprocess.run([*command, *settings], check=True, capture_output=True)
        yield scratch / "run"


def skipped_seconds(minutes: float) -> float:
    """The beginning, which does not count: ten minutes of an hour."""
    return min(600.0, minutes * 10)


def soak_tune(minutes: float, cluster: Cluster | None = None) -> dict[str, Any]:
    """A study with two workers for ``minutes``, then kill -9 of the process that started them.

    The server ``cluster`` is restarted every five minutes, in turn after a shutdown and as after a crash.
    """
    with TemporaryDirectory() as studies, scratch_folder() as scratch:  # the study itself grows by its trials
        study_folder, restarts = Path(studies) / "study", 0
        command = [sys.executable, "-m", "comet_moe", "tune", "multidigits", "--gates", "topk,comet"]
        command += ["--trials", "2000", "--workers", "2", "--out", str(study_folder)]
        command += [] if cluster is None else ["--storage", cluster.url]
        command += [part for setting in TRIAL for part in ("--set", setting)]
        with open(f"{studies}/log", "w") as log:
            study = subprocess.Popen(command, stdout=log, stderr=log)
        samples, size_of_trials = Samples(scratch), []
        try:
            while samples.started + 60 * minutes > time.monotonic() and study.poll() is None:
                samples.take([study.pid, *children(study.pid)])
                if samples.rows[-1].seconds >= skipped_seconds(minutes):
                    size_of_trials.append(size_per_trial(study_folder))
                if cluster is not None and samples.rows[-1].seconds > (restarts + 1) * RESTART_SECONDS:
                    cluster.restart("immediate" if restarts % 2 else "fast")
                    restarts += 1
                time.sleep(SAMPLE_SECONDS)
            workers, ended_early = children(study.pid), study.poll() is not None
            trials = [json.loads(line) for line in (study_folder / "trials.jsonl").read_text().splitlines()]
            message = Path(f"{studies}/log").read_text()[-300:] if ended_early else None
        finally:
            study.send_signal(signal.SIGKILL)
            study.wait()
        killed = time.monotonic()
        while any(map(is_alive, workers)) and time.monotonic() < killed + 120:
            time.sleep(0.5)
        left = [pid for pid in workers if is_alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        by_status = dict.fromkeys(("complete", "failed"), 0)
        for trial in trials:
            by_status[trial["status"]] = by_status.get(trial["status"], 0) + 1
        fifth = max(1, len(size_of_trials) // 5)
        first, last = np.mean(size_of_trials[:fifth]), np.mean(size_of_trials[-fifth:])
        return samples.summary(skipped_seconds(minutes)) | {
            "restarts": restarts,
            "kb_per_trial_first": round(float(first), 2),
            "kb_per_trial_last": round(float(last), 2),
            "trials": by_status,
            "trials_written_twice": len(trials) - len({(trial["gate"], trial["index"]) for trial in trials}),
            "ended_early": message,
            "orphans": len(left),
            "seconds_until_workers_ended": round(time.monotonic() - killed, 1),
        }


def size_per_trial(study: Path) -> float:
    """Mean size of the run folders that have a result, in kB, without their weights."""
    ended = [file.parent for file in study.glob("runs/*/result.json")]
    weights = sum(file.stat().st_size for file in study.glob("runs/*/model.safetensors")) / 1e3
    return (sum(map(disk, ended)) - weights) / max(1, len(ended))


def repeat(
    call: Callable[[], object], count: int = 0, minutes: float = 0.0, folder: Path | None = None
) -> dict[str, Any]:
    """Call ``call`` in this process, ``count`` times or for ``minutes``."""
    samples = Samples(folder)
    number, last, seconds = 0, -SAMPLE_SECONDS, 0.0
    while number < count or seconds < 60 * minutes:
        call()
        number, seconds = number + 1, time.monotonic() - samples.started
        if number % max(1, count // 200) == 0 if count else seconds - last >= SAMPLE_SECONDS:
            samples.take([os.getpid(), *children(os.getpid())])
            last = seconds
    samples.take([os.getpid(), *children(os.getpid())])
    skipped = skipped_seconds(minutes) if minutes else samples.rows[-1].seconds / 10
    return {"calls": number} | samples.summary(skipped)


def soak_compare(minutes: float) -> dict[str, Any]:
    """Comparisons on a small table in this process, each in a folder that is then removed."""
    from comet_moe.cli.app import app

    rng = np.random.default_rng(0)
    with scratch_folder() as scratch, open(os.devnull, "w") as nowhere:
        x = rng.normal(size=(400, 3))
        table = np.column_stack([x, x[:, 0] * (x[:, 1] > 0)])
        np.savetxt(scratch / "t.csv", table, delimiter=",", header="a,b,c,y", comments="")
        out = scratch / "study"
        command = ["compare", f"{scratch}/t.csv", "--targets", "y", "--gates", "topk", "--seeds", "1"]
        command += ["--budget", "none", "--workers", "1", "--set", "training.epochs=2", "--out", str(out)]

        def compare() -> None:
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                app(command, standalone_mode=False)
            assert (out / "compare.html").is_file()
            shutil.rmtree(out)

        return repeat(compare, minutes=minutes, folder=scratch)


def soak_calls(count: int) -> dict[str, Any]:
    """Predictions of one loaded model, on four rows each."""
    import torch

    from comet_moe.experiments.training.recipe import load_run

    torch.set_num_threads(1)
    with tiny_run() as path:
        run = load_run(path)
        features = run.model.example_features(4)
    with torch.no_grad():
        return repeat(lambda: run.model(features), count)


def soak_steps(count: int) -> dict[str, Any]:
    """Training steps of a small mixture with a monitor that logs every 50 steps."""
    with training_step(search_steps=count // 2) as (_, step):
        return repeat(step, count)


def soak_audits(minutes: float) -> dict[str, Any]:
    """The same training, with an audit every 500 steps, within a twentieth of the time."""
    import torch

    from comet_moe.audit.periodic import PeriodicAudit

    with training_step(search_steps=1000) as (model, step):

        def loss(model: Any, batch: Any) -> Any:
            return (model(batch)[0] - batch[:, :4]).square().mean(-1)

        audits = PeriodicAudit([torch.randn(64, 16) for _ in range(4)], loss, interval=500)

        def audited() -> None:
            step()
            audits.after_step(model)

        with scratch_folder() as scratch:
            return repeat(audited, minutes=minutes, folder=scratch) | {"audits": len(audits.reports)}


@contextmanager
def training_step(search_steps: int) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A small mixture with a search, and a training step of it under a monitor that logs every 50 steps."""
    import torch

    import comet_moe
    from comet_moe import MoE, Permutation, PermutedGate, RoutingMonitor
    from comet_moe.experts import DenseExperts
    from comet_moe.gates import CometGate

    torch.set_num_threads(1)
    torch.manual_seed(0)
    gate = PermutedGate(CometGate(16, 8, k=2), Permutation(8, steps=search_steps))
    model = MoE(experts=DenseExperts(8, 16, 4), gate=gate)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(64, 16), torch.randn(64, 4)
    done = 0
    with RoutingMonitor(model) as monitor:

        def step() -> None:
            nonlocal done
            optimizer.zero_grad()
            output, _ = model(x)
            (torch.nn.functional.mse_loss(output, y) + monitor.aux_loss).backward()
            optimizer.step()
            comet_moe.step(model)
            done += 1
            if done % 50 == 0:
                monitor.statistics()

        yield model, step


def exceeded(result: dict[str, Any]) -> list[str]:
    """The limits that a result exceeds."""
    is_study = "orphans" in result
    memory = "memory_slope_percent_per_hour" if is_study else "memory_mb_growth_percent"
    found = [name for name in (memory, "disk_kb_growth_percent") if result[name] >= MAX_GROWTH]
    found += [name for name in ("files", "threads") if result[f"{name}_last"] > result[f"{name}_first"]]
    if is_study:
        found += [name for name in ("orphans", "trials_written_twice", "ended_early") if result[name]]
        if result["trials"]["failed"]:
            found.append("failed trials")
        if result["kb_per_trial_last"] > result["kb_per_trial_first"] * (1 + MAX_GROWTH / 100):
            found.append("kb_per_trial_last")
    return found


def main() -> None:
    """Run one part."""
    timed: dict[str, Callable[[float], dict[str, Any]]]
    timed = {"tune": soak_tune, "compare": soak_compare, "audits": soak_audits}
    counted = {"calls": (soak_calls, 100_000), "steps": (soak_steps, 10_000)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=(*timed, "postgres", *counted))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--count", type=int, default=None)
    given = parser.parse_args()
    if given.part == "postgres":
        with Cluster() as cluster:
            result = soak_tune(given.minutes, cluster)
    elif given.part in timed:
        result = timed[given.part](given.minutes)
    else:
        soak, count = counted[given.part]
        result = soak(given.count or count)
    failed = exceeded(result)
    print(json.dumps({"part": given.part, **result, "exceeded": failed}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
