"""Experts spread over two processes beside data parallelism: time of a step, and bytes that travel."""

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes

from benchmarks.result import Result, timed_result
from benchmarks.timing import Ratio
from comet_moe.experts import FeedForwardExperts
from comet_moe.gates import TopKGate
from comet_moe.mixture.moe import MoE

PROCESSES, N, P, HIDDEN, K, BATCH = 2, 16, 256, 512, 2, 512
LIMIT_SECONDS = 300


def measure_parallel(quick: bool) -> Iterator[Result]:
    """Step with spread experts / step with replicated ones; bytes of a forward pass / k·(p + u) numbers."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        context = start_processes(
            _run_rank, (folder, port, 6 if quick else 40), PROCESSES, join=False, start_method="spawn"
        )
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while not context.join(1.0):  # True once all have ended
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the processes did not end within {LIMIT_SECONDS} seconds")
        finally:
            for process in context.processes:
                process.kill()
        spread, replicated, bytes_per_row = json.loads(Path(folder, "result.json").read_text())
    ratios = [a / b for a, b in zip(spread, replicated, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    ratio = Ratio(median(ratios), low, high, median(spread), median(replicated), len(ratios))
    case = f"{N} experts, k={K}, p=u={P}, batch {BATCH} per process, {PROCESSES} processes, 1 thread each"
    yield timed_result("expert-parallel step / DDP step", case, ratio, float("inf"))
    bound = K * (P + P) * 4
    yield Result("bytes sent per row, forward / k·(p + u) numbers", case, bytes_per_row / bound, 1.0)


def _run_rank(rank: int, folder: str, port: int, pairs: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from comet_moe.parallel import data_parallel, expert_parallel

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=LIMIT_SECONDS))
    mesh = init_device_mesh("cpu", (PROCESSES,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    spread = expert_parallel(_mixture(), mesh)
    steps = [_make_step(data_parallel(spread, mesh)), _make_step(data_parallel(_mixture(), mesh))]
    seconds: list[list[float]] = [[], []]
    for turn in range(pairs + 2):  # the first two are not counted
        for step, of_step in zip(steps, seconds, strict=True):
            dist.barrier()
            started = time.perf_counter()
            step()
            dist.barrier()
            if turn > 1:
                of_step.append(time.perf_counter() - started)
    experts = spread.experts
    experts.traffic.reset()  # type: ignore[operator, union-attr]
    with torch.no_grad():
        spread(torch.randn(BATCH, P))
    sent = torch.tensor(float(experts.traffic.row_bytes))  # type: ignore[arg-type, union-attr]
    dist.all_reduce(sent)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps([*seconds, float(sent) / (BATCH * PROCESSES)]))
    dist.destroy_process_group()


def _mixture() -> MoE:
    experts = FeedForwardExperts(N, P, HIDDEN)
    return MoE(experts=experts, gate=TopKGate(P, N, k=K), execution="sparse", return_routing=False)


def _make_step(model: nn.Module) -> Callable[[], None]:
    x = torch.randn(BATCH, P)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    return step
