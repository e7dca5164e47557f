"""Layers of small experts: a training step and inference at a thousand and at a million experts.

Times are those of the processor with one thread.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from benchmarks.gates import K, hard_gate
from benchmarks.memory import measure_peak
from benchmarks.result import Result, timed_result
from benchmarks.timing import Function, Ratio, measure_ratio
from comet_moe import LazyAdam, MoE
from comet_moe.experiments.training.optimizer import build_optimizer
from comet_moe.experts import NeuronExperts
from comet_moe.gates import Gate, HashGate, ProductKeyGate

P, WIDTH, ROWS = 64, 4, 1024
FEW, MANY = 2**10, 2**20
KEYS = 2**20
CHOICES = {"hash": (1, 1), "product keys k=2": (2, 1), "product keys k=16 heads=2": (16, 2)}
"""k and heads of each gate. A row of the last reads and moves 32 experts, of which few are shared at 2^20."""

STEP = "layer of small experts, step with LazyAdam, n=2^20 / n=2^10"


def _measure(function: Function, reference: Function, seconds: float, calls: int = 1) -> Ratio:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure_ratio(function, reference, seconds, calls, time.process_time)
    finally:
        torch.set_num_threads(threads)


def make_gate(kind: str, n: int) -> Gate:
    """A gate whose cost does not grow with n, or with its square root only."""
    k, heads = CHOICES[kind]
    return HashGate(KEYS, n) if kind == "hash" else ProductKeyGate(P, n, k=k, heads=heads)


def make_step(kind: str, n: int) -> Callable[[], None]:
    """A training step of a layer: LazyAdam for the experts, Adam for the gate."""
    layer = MoE(experts=NeuronExperts(n, P, P, WIDTH, sparse=True), gate=make_gate(kind, n))
    optimizers: list[torch.optim.Optimizer] = [LazyAdam(layer.experts.parameters(), lr=1e-3)]
    if kind != "hash":
        optimizers.append(torch.optim.Adam(layer.gate.parameters(), fused=True))
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        x = torch.randn(ROWS, P, generator=generator)
        y, _ = layer(x, keys=torch.randint(KEYS, (ROWS,), generator=generator))
        (y - x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def make_hash_step() -> Callable[[], None]:
    """The step of a hash gate whose memory is measured."""
    return make_step("hash", MANY)


def make_narrow_step() -> Callable[[], None]:
    """The step of product keys with 2 experts per row whose memory is measured."""
    return make_step("product keys k=2", MANY)


def make_wide_step() -> Callable[[], None]:
    """The step of product keys with 32 experts per row whose memory is measured."""
    return make_step("product keys k=16 heads=2", MANY)


def measure_neurons(quick: bool) -> Iterator[Result]:
    """Time of a step and of one row at 2^20 experts, and the memory of a step.

    The dense layer has as many neurons as one row selects. Its time has no gate.
    """
    seconds = 2 if quick else 8
    for kind, make in zip(CHOICES, (make_hash_step, make_narrow_step, make_wide_step), strict=True):
        case = f"{kind}, p=u={P} width={WIDTH} B={ROWS}"
        ratio = _measure(make_step(kind, MANY), make_step(kind, FEW), seconds)
        yield timed_result(STEP, case, ratio, 4.0)
        yield from _measure_memory(case, make)
        yield from _measure_one_row(kind, seconds)
    yield from _measure_comet_row(seconds)
    yield from measure_peer(quick)
    yield from _measure_embeddings(seconds)


def _measure_memory(case: str, make: Callable[[], Callable[[], None]]) -> Iterator[Result]:
    """Peak memory of a step beyond parameters and the state of the optimisers, in units of 200 MB."""
    peak, measurement = measure_peak(make), "memory of the same step at n=2^20 / 200 MB"
    if peak is None:
        yield Result(measurement, case, None, 1.0, note="the peak of a process is measured on Linux only")
    else:
        yield Result(measurement, f"{case}, {peak / 1e6:.1f} MB", peak / 200e6, 1.0)


def _measure_one_row(kind: str, seconds: float) -> Iterator[Result]:
    yield _row_by_dense(kind, make_gate(kind, MANY), WIDTH * prod(CHOICES[kind]), seconds)


def _measure_comet_row(seconds: float) -> Iterator[Result]:
    yield _row_by_dense(f"COMET k={K}", hard_gate(P, MANY), WIDTH * K, seconds)


@torch.no_grad()
def _row_by_dense(name: str, gate: Gate, neurons: int, seconds: float) -> Result:
    layer = MoE(experts=NeuronExperts(MANY, P, P, WIDTH), gate=gate).eval()
    dense = nn.Sequential(nn.Linear(P, neurons, bias=False), nn.GELU(), nn.Linear(neurons, P, bias=False))
    x, key = torch.randn(1, P), torch.tensor([7])
    ratio = _measure(lambda: layer(x, keys=key), lambda: dense(x), seconds, calls=100)
    case = f"{name}, p=u={P} width={WIDTH}"
    return timed_result("inference of one row at n=2^20 / dense layer of its neurons", case, ratio, 3.0)


def measure_peer(quick: bool) -> Iterator[Result]:
    """A layer of small experts behind COMET / behind product keys (PEER), of the same n, k and width.

    Both layers share their experts, which would otherwise fill the memory twice. The splits are hard.
    """
    seconds = 2 if quick else 15
    for n, p in ((2**16, 64),) if quick else ((2**16, 64), (2**16, 256), (2**20, 64)):
        experts = NeuronExperts(n, p, p, WIDTH, sparse=True)
        comet, keys = hard_gate(p, n), ProductKeyGate(p, n, k=K)
        comet.sparse = True
        layers = [MoE(experts=experts, gate=gate) for gate in (comet, keys)]
        lazy = LazyAdam(experts.parameters()), LazyAdam(comet.parameters())
        dense = torch.optim.Adam(keys.parameters(), fused=True)
        step, peer_step = (
            make_layer_step(layer, p, optimizers)
            for layer, optimizers in zip(layers, (lazy, (lazy[0], dense)), strict=True)
        )
        case = f"n=2^{n.bit_length() - 1} p=u={p} k={K} width={WIDTH}"
        ratio = _measure(step, peer_step, seconds)
        yield timed_result("COMET / product keys, training step", f"{case} B={ROWS}", ratio, 0.5)
        for rows in (1, ROWS):
            x = torch.randn(rows, p)
            call, peer_call = (torch.no_grad()(partial(layer.eval(), x)) for layer in layers)
            ratio = _measure(call, peer_call, seconds / 3, 100 if rows == 1 else 1)
            yield timed_result("COMET / product keys, inference", f"{case} B={rows}", ratio, 0.5)


def make_layer_step(
    layer: MoE, in_features: int, optimizers: Sequence[torch.optim.Optimizer]
) -> Callable[[], None]:
    """A training step of ``layer`` with these optimisers."""
    layer.train()
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        x = torch.randn(ROWS, in_features, generator=generator)
        y, _ = layer(x)
        (y - x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _measure_embeddings(seconds: float) -> Iterator[Result]:
    """A step of a million categories / of a thousand, with a lazy and with a dense Adam."""
    for sparse in (True, False):
        many, few = (_make_embedding_step(rows, sparse) for rows in (10**6, 10**3))
        name = "training.sparse_embeddings" if sparse else "dense Adam"
        case = f"{name}, width 32, B={ROWS}"
        ratio = _measure(many, few, seconds)
        target = 2.0 if sparse else float("inf")
        yield timed_result("step of 10^6 categories / of 10^3", case, ratio, target)


def _make_embedding_step(rows: int, sparse: bool) -> Callable[[], None]:
    model = nn.Sequential(nn.Embedding(rows, 32), nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = build_optimizer(model, 1e-3, None, sparse)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        codes: Tensor = torch.randint(rows, (ROWS,), generator=generator)
        model(codes).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
