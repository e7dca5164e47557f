"""The cost of a training pass of a gate for growing n: COMET over visited nodes, product keys, Top-k."""

import time
from collections.abc import Iterator

import torch

from benchmarks.gates import K, hard_gate, measure_inference_growth
from benchmarks.result import Result, timed_result
from benchmarks.threads import on_threads
from benchmarks.timing import Function, divide, invert, measure_ratios
from comet_moe.gates import Gate, ProductKeyGate, TopKGate

ROWS, FEATURES = 1024, 256
TARGETS = {64: 1.5, 1024: 0.3, 16384: 0.05}
EXPERTS = (64, 256, 1024, 4096, 16384)
TRAINING = {
    "COMET": "COMET / Top-k gate, training pass, sparse gradients",
    "product keys": "product keys / Top-k gate, training pass",
}
"""The measurements of gates whose times the picture has, by gate."""


def make_pass(gate: Gate) -> Function:
    """A forward and a backward pass on one thread, from no gradient."""
    gate.train()
    x = torch.randn(ROWS, FEATURES, requires_grad=True)

    def run() -> None:
        gate.zero_grad()
        routing = gate(x)
        (routing.stored_weights.square().sum() + routing.aux_loss).backward()

    return on_threads(1, run)


def measure_growth(quick: bool) -> Iterator[Result]:
    """Inference, then training."""
    yield from measure_inference_growth(quick)
    yield from measure_training_growth(quick)


def measure_training_growth(quick: bool) -> Iterator[Result]:
    """A training pass at n=16384 / at n=64, and two gates / Top-k; the passes run in turn.

    Times are those of the processor, since a pass has one thread. The splits are hard. The gradients of
    COMET's parameters are sparse, for a lazy optimiser. One case has dense ones, which are as large as the
    parameters. Product keys have 2 experts of 1 head.
    """
    passes = {}
    experts = TARGETS if quick else EXPERTS
    for n in experts:
        for sparse in (True, False):
            if sparse or n in TARGETS:
                gate = hard_gate(FEATURES, n)
                gate.sparse = sparse
                passes["sparse" if sparse else "dense", n] = make_pass(gate)
        passes["keys", n] = make_pass(ProductKeyGate(FEATURES, n, k=K))
        passes["topk", n] = make_pass(TopKGate(FEATURES, n, K))
    reference = passes.pop(("sparse", 64))
    ratios = measure_ratios([*passes.values(), reference], 10 if quick else 60, clock=time.process_time)
    by_pass = dict(zip(passes, ratios, strict=True))
    case = f"p={FEATURES} B={ROWS} k={K}, one thread"
    growth = "COMET training pass, hard splits, n=16384 / n=64"
    yield timed_result(growth, case, by_pass["sparse", 16384], 3.0)
    dense = divide(by_pass["dense", 16384], by_pass["dense", 64])
    yield timed_result(f"{growth}, dense gradients", case, dense, float("inf"))
    for n in experts:
        top_k = by_pass["topk", n]
        for kind, name, goal in (
            ("sparse", TRAINING["COMET"], TARGETS.get(n, float("inf"))),
            ("dense", "COMET / Top-k gate, training pass, dense gradients", float("inf")),
            ("keys", TRAINING["product keys"], float("inf")),
        ):
            if (kind, n) in by_pass:
                yield timed_result(name, f"{case}, n={n}", divide(by_pass[kind, n], top_k), goal)
            elif kind == "sparse":
                yield timed_result(name, f"{case}, n={n}", invert(top_k), goal)
