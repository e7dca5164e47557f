"""Peak memory of a function: of torch, numpy and compiled loops alike, as the operating system counts it.

The function runs in a process of its own. It is called once, so that all is compiled and loaded; then Linux
resets the high-water mark of the process's resident memory, and the function is called again. The peak is the
mark minus the resident memory just before. glibc takes each block of 64 KiB or more from the system and gives
it back when it is freed, so that no block fills a hole left by the first call and stays unseen. Memory that
is never written does not count, and the counts of Linux are exact to a few hundred kilobytes.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024), "MALLOC_TRIM_THRESHOLD_": "0"}
_PROGRAM = "import sys; from benchmarks.memory import print_peak; print_peak(*sys.argv[1:])"


def measure_peak(make: Callable[[], Callable[[], object]]) -> int | None:
    """Bytes that a function needs at most beyond what is in memory before its call; None if not on Linux.

    Args:
        make: a function of a module, without arguments, that returns the function to measure.
    """
    if not _RESET.exists():
        return None
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, make.__module__, make.__name__],
        env=os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return int(done.stdout)


def print_peak(module: str, name: str) -> None:
    """Print the peak of the function that ``name`` in ``module`` makes: the program of the process."""
    make = getattr(__import__(module, fromlist=[name]), name)
    function = make()
    function()
    _RESET.write_text(_RESET_PEAK)
    before = _read_status("VmRSS")
    function()
    print(_read_status("VmHWM") - before)


def _read_status(field: str) -> int:
    """A size in ``/proc/self/status``, in bytes."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return 1024 * int(lines[field].split()[0])
