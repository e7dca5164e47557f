"""Starts a group of processes once, runs many checks in it, and keeps what each check said.

Starting a process takes long, a check milliseconds; so one group of 2 and one of
4 processes run all checks that pass, also for all workers of pytest-xdist, of which the first one starts it.
"""

import fcntl
import json
import os
import socket
import time
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from forked import preload

TIMEOUT = 300
"""Seconds that a group may take, on a busy machine too. A collective that hangs fails after 120."""

TOTAL_TIMEOUT = 500
"""Seconds that all groups of one size may take, less than a test may."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_group(size, folder):
    """Outcomes of the checks of ``size`` ranks in all_checks.py, functions of a mesh of one dimension "ep".

    Returns for each check the errors of its ranks, earliest first, or None where all passed. A rank that
    fails leaves the others in the middle of a collective, so the group ends and a new one runs the rest.
    """
    outcomes = {}
    remaining = list(import_module("all_checks").CHECKS[size])
    deadline = time.monotonic() + TOTAL_TIMEOUT - TIMEOUT
    while remaining:
        if time.monotonic() > deadline:
            return outcomes | dict.fromkeys(remaining, "not run: the checks before it took too long")
        attempt = Path(folder, str(len(outcomes)))
        attempt.mkdir()
        ended = _start_group(size, attempt, remaining)
        passed = [_read_lines(attempt / f"{rank}.passed") for rank in range(size)]
        while remaining and all(remaining[0] in own for own in passed):
            outcomes[remaining.pop(0)] = None
        errors = sorted(attempt.glob("*.error"), key=lambda file: file.stat().st_mtime_ns)
        if not errors and not any(passed):
            return outcomes | dict.fromkeys(remaining, f"the group did not start: {ended}")
        if remaining:  # the errors are those of this check, and of ranks that were waiting for it in the next
            outcomes[remaining.pop(0)] = "\n".join(file.read_text() for file in errors) or ended
    return outcomes


def _start_group(size, folder, checks):
    """Run a group until all ranks have ended, one has failed or time is over; returns how it ended."""
    preload()
    processes = mp.start_processes(
        _run_rank,
        args=(size, str(folder), free_port(), checks),
        nprocs=size,
        start_method="forkserver",
        join=False,
    )
    try:
        deadline = time.monotonic() + TIMEOUT
        while not processes.join(1.0, grace_period=5.0):  # True once all have ended
            if time.monotonic() > deadline:
                return f"the group has not ended after {TIMEOUT} seconds"
    except (ProcessRaisedException, ProcessExitedException) as error:
        return str(error)
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()
    return "the group has ended without an error"


def _read_lines(file):
    return file.read_text().splitlines() if file.exists() else []


def _run_rank(rank, size, folder, port, checks):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    functions = import_module("all_checks").CHECKS[size]
    with open(Path(folder, f"{rank}.passed"), "w") as passed:
        for name in checks:
            torch.manual_seed(0)
            try:
                functions[name](mesh)
            except BaseException:
                Path(folder, f"{rank}.error").write_text(f"rank {rank}, {name}: {traceback.format_exc()}")
                raise
            print(name, file=passed, flush=True)
    dist.destroy_process_group()


def shared_outcomes(tmp_path_factory, name, run):
    """``run(folder)``, once for all workers of pytest-xdist."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    kept = root / f"{name}.json"
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            folder = root / name
            folder.mkdir()
            kept.write_text(json.dumps(run(str(folder))))
    return json.loads(kept.read_text())
