"""Inference of the COMET gate: compared with Top-k, with soft paths, and for growing n."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.memory import measure_peak
from benchmarks.result import Result, timed_result
from benchmarks.timing import measure_ratio
from comet_moe.gates import CometGate, TopKGate

K = 2
GATE = "COMET gate / Top-k gate, inference"


def hard_gate(p: int, n: int, gamma: float = 1e-4) -> CometGate:
    """A gate whose split nodes are hard (far outside the smooth step) for inputs from N(0, 1)."""
    gate = CometGate(p, n, K, gamma).eval()
    torch.nn.init.normal_(gate.split_weight)
    return gate


@torch.no_grad()
def measure_gate(quick: bool) -> Iterator[Result]:
    """COMET gate with hard paths / Top-k: the gate of this library, and its three torch operators alone.

    The operators alone have no module call, no checks of the input and no ``Routing``: on one row these are
    most of the cost of a gate.
    """
    widths, batches = ((256,), (1, 32, 4096)) if quick else ((256, 768), (1, 32, 4096))
    experts = (16, 1024) if quick else (16, 64, 256, 1024, 4096, 16384)
    for p in widths:
        for rows in batches:
            for n in experts:
                gate, top_k_gate, x = hard_gate(p, n), TopKGate(p, n, K).eval(), torch.randn(rows, p)
                weight, bias = top_k_gate.weight, top_k_gate.bias

                def top_k(x: Tensor = x, weight: Tensor = weight, bias: Tensor = bias) -> Tensor:
                    kept, _ = F.linear(x, weight, bias).topk(K, dim=-1)
                    return kept.softmax(-1)

                calls = 200 if rows == 1 else 20 if rows == 32 else 1
                seconds, case = 0.3 if quick else 1.0, f"p={p} B={rows} n={n}"
                for name, reference in (
                    (GATE, lambda gate=top_k_gate, x=x: gate(x)),
                    ("COMET gate / Top-k's operators, inference", top_k),
                ):
                    ratio = measure_ratio(lambda gate=gate, x=x: gate(x), reference, seconds, calls)  # type: ignore[misc]
                    yield timed_result(name, case, ratio, _target(rows, n))


def _target(rows: int, n: int) -> float:
    """Calls on one row may cost more at both ends of n, where the checks around the walk weigh most."""
    if n >= 1024:
        return 0.5 if rows == 1 else 0.15
    return 2.0 if (rows, n) == (1, 16) else 0.8


@torch.no_grad()
def measure_soft_paths(quick: bool) -> Iterator[Result]:
    """Time with 5 % soft nodes / time with none, divided by the ratio of visited nodes."""
    p, rows = 256, 4096
    for n in (64,) if quick else (64, 1024, 16384):
        hard, x = hard_gate(p, n), torch.randn(rows, p)
        soft = hard_gate(p, n, gamma=0.05 * (2 * torch.pi * p) ** 0.5)  # P(|N(0, p)| < γ/2) = 0.05
        soft.load_state_dict(hard.state_dict())
        visits = [gate(x).gate_flops for gate in (soft, hard)]
        assert visits[0] is not None
        assert visits[1] is not None
        nodes = visits[0] / visits[1]
        ratio = measure_ratio(
            lambda soft=soft, x=x: soft(x),  # type: ignore[misc]
            lambda hard=hard, x=x: hard(x),  # type: ignore[misc]
            0.5 if quick else 3,
        )
        case = f"p={p} B={rows} n={n}, {nodes:.2f}x the nodes"
        yield timed_result("5 % soft nodes / hard, over nodes visited", case, ratio, 1.15, scale=nodes)


@torch.no_grad()
def measure_inference_growth(quick: bool) -> Iterator[Result]:
    """Time at n=16384 / time at n=64."""
    p = 256
    for rows, target in ((32, 3.0), (4096, 5.0)):
        few, many = hard_gate(p, 64), hard_gate(p, 16384)
        x = torch.randn(rows, p)
        ratio = measure_ratio(
            lambda many=many, x=x: many(x),  # type: ignore[misc]
            lambda few=few, x=x: few(x),  # type: ignore[misc]
            0.5 if quick else 3,
            20 if rows == 32 else 1,
        )
        yield timed_result("COMET inference, n=16384 / n=64", f"p={p} B={rows}", ratio, target)


MEMORY_ROWS, MEMORY_EXPERTS = 4096, 16384


def make_memory_call() -> Callable[[], object]:
    """The call whose memory is measured: inference of one gate on one batch."""
    gate, x = hard_gate(256, MEMORY_EXPERTS), torch.randn(MEMORY_ROWS, 256)
    return torch.no_grad()(lambda: gate(x))


def measure_memory(quick: bool) -> Iterator[Result]:
    """Peak memory of inference with 16,384 experts / memory of one tensor (B, n).

    The peak is that of the resident memory of a process, which counts torch's, numpy's and the compiled
    loops' arrays; see :mod:`benchmarks.memory`.
    """
    measurement, case = (
        "memory of the COMET gate / one (B, n) tensor",
        f"B={MEMORY_ROWS} n={MEMORY_EXPERTS}",
    )
    peak = measure_peak(make_memory_call)
    if peak is None:
        yield Result(measurement, case, None, 0.01, note="the peak of a process is measured on Linux only")
        return
    value = peak / (4 * MEMORY_ROWS * MEMORY_EXPERTS)
    yield Result(measurement, f"{case}, {peak / 1e6:.2f} MB at most", value, 0.01)
