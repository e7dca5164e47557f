"""Does it pay to overlap the first product with the exchange of the second chunk?

    python benchmarks/overlap.py

Two processes with one thread each share 16 experts, as in `comet-moe bench parallel`. A forward pass sends
rows to their experts, runs these and sends outputs back. Measured: in one piece; in two chunks (half of each
rank's experts), one after the other; and in two chunks of which the second travels, asynchronously, while
the experts of the first run, as the outputs of the first do while the experts of the second run. All counts
are equal, so that imbalance takes no part. Times are medians over interleaved passes; the ratio is to one
piece.
"""

import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from comet_moe.experts import FeedForwardExperts

RANKS, EXPERTS, WIDTH, HIDDEN = 2, 16, 256, 512
TURNS = 60


def exchange(rows):
    """(R, ...) the part of each rank -> (R, ...) what each rank sent to this one; and the running request."""
    received = torch.empty_like(rows)
    return received, dist.all_to_all_single(received, rows, async_op=True)


def run(experts, arrived):
    """(R, experts, rows, p) of one chunk through its experts."""
    own, rows = arrived.shape[1], arrived.shape[0] * arrived.shape[2]
    by_expert = arrived.transpose(0, 1).reshape(own * rows, WIDTH)
    outputs = experts.sparse(by_expert, [rows] * own)
    return outputs.view(own, RANKS, -1, WIDTH).transpose(0, 1).contiguous()


def in_one_piece(stacks, chunks):
    received, request = exchange(torch.cat(chunks, 1))
    request.wait()
    half = received.shape[1] // 2
    parts = [
        run(stack, part) for stack, part in zip(stacks, (received[:, :half], received[:, half:]), strict=True)
    ]
    exchange(torch.cat(parts, 1))[1].wait()


def one_after_the_other(stacks, chunks):
    for stack, chunk in zip(stacks, chunks, strict=True):
        received, request = exchange(chunk)
        request.wait()
        exchange(run(stack, received))[1].wait()


def overlapped(stacks, chunks):
    first, first_request = exchange(chunks[0])
    second, second_request = exchange(chunks[1])
    first_request.wait()
    _, first_back = exchange(run(stacks[0], first))
    second_request.wait()
    _, second_back = exchange(run(stacks[1], second))
    first_back.wait()
    second_back.wait()


@torch.no_grad()
def measure(rank, folder, port, batch):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    stacks = [FeedForwardExperts(EXPERTS // RANKS // 2, WIDTH, HIDDEN) for _ in range(2)]
    rows = 2 * batch // EXPERTS  # k=2
    chunks = [torch.randn(RANKS, EXPERTS // RANKS // 2, rows, WIDTH) for _ in range(2)]
    passes = (in_one_piece, one_after_the_other, overlapped)
    seconds = {run_pass.__name__: [] for run_pass in passes}
    for turn in range(TURNS + 3):
        for run_pass in passes:
            dist.barrier()
            started = time.perf_counter()
            run_pass(stacks, chunks)
            dist.barrier()
            if turn >= 3:
                seconds[run_pass.__name__].append(time.perf_counter() - started)
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def main():
    print("| rows per process | pass | ms | ratio to one piece (quartiles) |\n|---|---|---|---|")
    for batch in (512, 4096):
        with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            probe.close()
            start_processes(measure, (folder, port, batch), RANKS, start_method="spawn")
            seconds = json.loads(Path(folder, "seconds.json").read_text())
        for name, times in seconds.items():
            ratios = [a / b for a, b in zip(times, seconds["in_one_piece"], strict=True)]
            low, middle, high = quantiles(ratios, n=4)
            row = f"| {batch} | {name.replace('_', ' ')} | {1e3 * median(times):.1f} |"
            print(f"{row} {middle:.2f} ({low:.2f} to {high:.2f}) |")


if __name__ == "__main__":
    sys.exit(main())
