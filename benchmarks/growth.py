"""The cost of a training pass of a gate for growing n: COMET over visited nodes, and Top-k."""

from collections.abc import Iterator

import torch

from benchmarks.gates import K, hard_gate, measure_inference_growth
from benchmarks.result import Result, timed_result
from benchmarks.threads import on_threads
from benchmarks.timing import Function, divide, invert, measure_ratios
from comet_moe.gates import Gate, TopKGate

ROWS, FEATURES = 1024, 256
TARGETS = {64: 1.5, 1024: 0.3, 16384: 0.05}


def make_pass(gate: Gate) -> Function:
    """A forward and a backward pass on one thread, from no gradient."""
    gate.train()
    x = torch.randn(ROWS, FEATURES, requires_grad=True)

    def run() -> None:
        gate.zero_grad()
        routing = gate(x)
        (routing.held_weights.square().sum() + routing.aux_loss).backward()

    return on_threads(1, run)


def measure_growth(quick: bool) -> Iterator[Result]:
    """Inference, then training."""
    yield from measure_inference_growth(quick)
    yield from measure_training_growth(quick)


def measure_training_growth(quick: bool) -> Iterator[Result]:
    """A training pass at n=16384 / at n=64, and COMET / Top-k; the passes run in turn.

    The splits are hard. The gradients of weights are sparse, for a lazy optimiser; one case has dense ones,
    which are as large as the weights.
    """
    passes = {}
    for n in TARGETS:
        for sparse in (True, False):
            gate = hard_gate(FEATURES, n)
            gate.sparse = sparse
            passes["sparse" if sparse else "dense", n] = make_pass(gate)
        passes["topk", n] = make_pass(TopKGate(FEATURES, n, K))
    reference = passes.pop(("sparse", 64))
    ratios = measure_ratios([*passes.values(), reference], 10 if quick else 60)
    by_pass = dict(zip(passes, ratios, strict=True))
    case = f"p={FEATURES} B={ROWS} k={K}, one thread"
    growth = "COMET training pass, hard splits, n=16384 / n=64"
    yield timed_result(growth, case, by_pass["sparse", 16384], 3.0)
    dense = divide(by_pass["dense", 16384], by_pass["dense", 64])
    yield timed_result(f"{growth}, dense gradients", case, dense, float("inf"))
    for n, target in TARGETS.items():
        for kind, goal in (("sparse", target), ("dense", float("inf"))):
            name = f"COMET / Top-k gate, training pass, {kind} gradients"
            top_k = by_pass["topk", n]
            ratio = divide(by_pass[kind, n], top_k) if (kind, n) in by_pass else invert(top_k)
            yield timed_result(name, f"{case}, n={n}", ratio, goal)
