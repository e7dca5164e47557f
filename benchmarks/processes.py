"""Memory, open files, threads and disk of processes over time. Linux only: it reads /proc."""

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


def resident(pid: int) -> float:
    """Resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def open_files(pid: int) -> int:
    """Number of open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int) -> int:
    """Number of threads of a process."""
    return len(os.listdir(f"/proc/{pid}/task"))


def disk(folder: Path) -> float:
    """Size of the files in a folder, in kB; one that is removed meanwhile does not count."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return size / 1e3


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


class Sample(NamedTuple):
    """What some processes use together at one time."""

    seconds: float
    memory_mb: float
    files: int
    threads: int
    disk_kb: float
    processes: int


class Samples:
    """Samples over time; ``folder`` is what counts as their disk."""

    def __init__(self, folder: Path | None = None) -> None:
        self.started = time.monotonic()
        self.folder = folder
        self.rows: list[Sample] = []

    def take(self, pids: list[int]) -> None:
        """Add a sample; a process that ended just now is left out."""
        memory, files, running, count = 0.0, 0, 0, 0
        for pid in pids:
            try:
                found = resident(pid), open_files(pid), threads(pid)
            except OSError:
                continue
            memory, files, running, count = memory + found[0], files + found[1], running + found[2], count + 1
        size = 0.0 if self.folder is None else disk(self.folder)
        self.rows.append(Sample(time.monotonic() - self.started, memory, files, running, size, count))

    def summary(self, skipped: float) -> dict[str, Any]:
        """The first and the last fifth of what came after ``skipped`` seconds.

        Only samples with as many processes as at the end count. Memory and disk are means, with the growth in
        percent. Files and threads are medians.
        """
        processes = self.rows[-1].processes
        kept = [row for row in self.rows if row.seconds >= skipped and row.processes == processes]
        table = np.array(kept)
        fifth = max(1, len(kept) // 5)
        found: dict[str, Any] = {
            "samples": len(kept),
            "minutes": round(kept[-1].seconds / 60, 1),
            "processes": processes,
        }
        for column, name in enumerate(Sample._fields):
            values = table[:, column]
            if name in ("memory_mb", "disk_kb"):
                first, last = values[:fifth].mean(), values[-fifth:].mean()
                found |= {f"{name}_first": round(float(first), 1), f"{name}_last": round(float(last), 1)}
                growth = 100 * (last / first - 1) if first else 0.0
                found[f"{name}_growth_percent"] = round(float(growth), 3)
                found[f"{name}_by_fifth"] = [
                    round(float(part.mean()), 1) for part in np.array_split(values, min(5, len(values)))
                ]
            elif name in ("files", "threads"):
                first, last = np.median(values[:fifth]), np.median(values[-fifth:])
                found |= {f"{name}_first": int(first), f"{name}_last": int(last)}
                found[f"{name}_most"] = int(values.max())
        slope = np.polyfit(table[:, 0], table[:, 1], 1)[0] * 3600 / table[:, 1].mean() * 100
        return found | {"memory_slope_percent_per_hour": round(float(slope), 3)}
