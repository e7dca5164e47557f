"""Starts a group of processes once, runs many checks in it, and keeps what each check said.

Starting a process and importing torch takes seconds, a check milliseconds; so there is one group of 2 and one
of 4 processes for all checks, also for all workers of pytest-xdist, of which the first one starts it.
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

TIMEOUT = 150
"""Seconds that a group may take. A collective that hangs fails after 30."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_group(size, folder):
    """Outcomes of the checks of ``size`` ranks in all_checks.py, functions of a mesh of one dimension "ep".

    Returns the first error of any rank for each check, None where all passed.
    """
    port = free_port()
    processes = mp.start_processes(
        _run_rank, args=(size, folder, port), nprocs=size, start_method="spawn", join=False
    )
    try:
        deadline = time.monotonic() + TIMEOUT
        while not processes.join(1.0) and time.monotonic() < deadline:  # True once all have ended
            pass
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()
    outcomes = {}
    for rank in range(size):
        for name, error in json.loads(Path(folder, f"{rank}.json").read_text()).items():
            outcomes[name] = outcomes.get(name) or error
    return outcomes


def _run_rank(rank, size, folder, port):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    outcomes = {}
    try:
        for name, check in import_module("all_checks").CHECKS[size].items():
            torch.manual_seed(0)
            error = None
            try:
                check(mesh)
            except BaseException:
                error = f"rank {rank}: {traceback.format_exc()}"
            failures = [None] * size
            dist.all_gather_object(failures, error)
            outcomes[name] = error
            if any(failures):  # the others may have stopped in the middle of a collective: fail them alone
                dist.barrier()
    finally:
        Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))
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
