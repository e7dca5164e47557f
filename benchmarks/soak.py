"""Does memory grow, do files stay open, do processes stay behind? Three parts, see docs/reliability.md.

    python benchmarks/soak.py tune --minutes 60      # a study with two workers; then kill -9 of its parent
    python benchmarks/soak.py calls --count 100000   # predictions of one loaded model in one process
    python benchmarks/soak.py steps --count 10000    # training steps with a RoutingMonitor

Each prints one JSON object and exits with code 1 where a limit is exceeded. Linux only: it reads /proc.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

MAX_SLOPE = 1.0
"""Growth of resident memory, % per hour, from a tenth of the time on (ten minutes of an hour: a sixth)."""

TRIAL = (
    *("data.options.train_size=1000", "data.options.validation_size=200", "data.options.test_size=200"),
    *("training.epochs=10", "training.patience=10", "model.filters=[4]", "model.units=[8]"),
)


def resident(pid: int) -> float:
    """Resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def open_files(pid: int) -> int:
    """Number of open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def children(pid: int) -> list[int]:
    """Processes below ``pid``, at any depth."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Samples:
    """Resident memory and open files of processes over time."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.rows: list[tuple[float, float, int, int]] = []  # seconds, MB, files, processes

    def take(self, pids: list[int]) -> None:
        """Add a sample; a process that ended just now is left out."""
        memory, files, count = 0.0, 0, 0
        for pid in pids:
            try:
                memory, files, count = memory + resident(pid), files + open_files(pid), count + 1
            except OSError:
                continue
        self.rows.append((time.monotonic() - self.started, memory, files, count))

    def summary(self, skipped: float) -> dict[str, Any]:
        """Slope and extremes of what came after ``skipped`` seconds, with as many processes as at the end."""
        processes = self.rows[-1][3]
        kept = np.array([row for row in self.rows if row[0] >= skipped and row[3] == processes])
        seconds, memory, files = kept[:, 0], kept[:, 1], kept[:, 2]
        slope = np.polyfit(seconds, memory, 1)[0] * 3600 / memory.mean() * 100
        fifth = max(1, len(kept) // 5)
        return {
            "samples": len(kept),
            "minutes": round(float(seconds[-1]) / 60, 1),
            "processes": processes,
            "memory_mb_first": round(float(memory[:fifth].mean()), 1),
            "memory_mb_last": round(float(memory[-fifth:].mean()), 1),
            "growth_percent": round(float(memory[-fifth:].mean() / memory[:fifth].mean() - 1) * 100, 3),
            "slope_percent_per_hour": round(float(slope), 3),
            "files_first": int(np.median(files[:fifth])),
            "files_last": int(np.median(files[-fifth:])),
            "files_most": int(files.max()),
        }


@contextmanager
def tiny_run() -> Iterator[Path]:
    """The folder of a run of one epoch."""
    with TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "comet_moe", "train", "multidigits", "--out", f"{scratch}/run"]
        settings = [part for setting in (*TRIAL, "training.epochs=1") for part in ("--set", setting)]
        environment = os.environ | {"COMET_MOE_CACHE": f"{scratch}/cache"}
        subprocess.run([*command, *settings], check=True, env=environment, capture_output=True)
        yield Path(scratch) / "run"


def soak_tune(minutes: float, skipped: float) -> dict[str, Any]:
    """A study with two workers for ``minutes``, then kill -9 of the process that started them."""
    with TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "comet_moe", "tune", "multidigits", "--gates", "topk,comet"]
        command += ["--trials", "2000", "--workers", "2", "--out", f"{scratch}/study"]
        command += [part for setting in TRIAL for part in ("--set", setting)]
        environment = os.environ | {"COMET_MOE_CACHE": f"{scratch}/cache", "OMP_NUM_THREADS": "1"}
        with open(f"{scratch}/log", "w") as log:
            study = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        samples = Samples()
        try:
            while samples.started + 60 * minutes > time.monotonic() and study.poll() is None:
                samples.take([study.pid, *children(study.pid)])
                time.sleep(5)
            workers = children(study.pid)
            trials = Path(f"{scratch}/study/trials.jsonl").read_text()
        finally:
            study.send_signal(signal.SIGKILL)
            study.wait()
        killed = time.monotonic()
        while any(map(is_alive, workers)) and time.monotonic() < killed + 120:
            time.sleep(0.5)
        left = [pid for pid in workers if is_alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return samples.summary(skipped) | {
            "trials_complete": trials.count('"status":"complete"'),
            "trials_failed": trials.count('"status":"failed"'),
            "orphans": len(left),
            "seconds_until_workers_ended": round(time.monotonic() - killed, 1),
        }


def repeat(count: int, call: Callable[[], object]) -> dict[str, Any]:
    """Call ``call`` ``count`` times in this process."""
    samples = Samples()
    for number in range(count):
        call()
        if number % max(1, count // 200) == 0:
            samples.take([os.getpid()])
    samples.take([os.getpid()])
    seconds = samples.rows[-1][0]
    return {"count": count} | samples.summary(skipped=seconds / 10)


def soak_calls(count: int) -> dict[str, Any]:
    """Predictions of one loaded model, on four rows each."""
    import torch

    from comet_moe.experiments.training.recipe import load_run

    torch.set_num_threads(1)
    with tiny_run() as path:
        run = load_run(path)
        features = run.model.example_features(4)
    with torch.no_grad():
        return repeat(count, lambda: run.model(features))


def soak_steps(count: int) -> dict[str, Any]:
    """Training steps of a small mixture with a monitor that logs every 50 steps."""
    import torch

    import comet_moe
    from comet_moe import MoE, Permutation, PermutedGate, RoutingMonitor
    from comet_moe.experts import DenseExperts
    from comet_moe.gates import CometGate

    torch.set_num_threads(1)
    torch.manual_seed(0)
    gate = PermutedGate(CometGate(16, 8, k=2), Permutation(8, steps=count // 2))
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

        return repeat(count, step)


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=("tune", "calls", "steps"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--count", type=int, default=None)
    given = parser.parse_args()
    if given.part == "tune":
        result = soak_tune(given.minutes, skipped=min(600.0, given.minutes * 10))
        grows = result["slope_percent_per_hour"] >= MAX_SLOPE
    else:
        soak = soak_calls if given.part == "calls" else soak_steps
        result = soak(given.count or {"calls": 100_000, "steps": 10_000}[given.part])
        grows = result["growth_percent"] >= MAX_SLOPE  # a slope per hour of a few minutes is mostly noise
    failed = grows or result["files_last"] > result["files_first"] or result.get("orphans", 0) > 0
    print(json.dumps({"part": given.part, **result, "passed": not failed}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
