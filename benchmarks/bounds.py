"""Where the time of missed targets goes: parts of an operation, timed in one interleaved run with all of it.

    python benchmarks/bounds.py

Each line is the time of a part divided by the time of the reference. What the parts do not explain is Python
and memory traffic.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gates import hard_gate as hard_comet
from benchmarks.neurons import ROWS, WIDTH, make_layer_step
from benchmarks.timing import Function, measure_ratios
from comet_moe import LazyAdam, MoE
from comet_moe.experts import DenseExperts, NeuronExperts
from comet_moe.experts.grouped_linear import grouped_linear
from comet_moe.gates import HashGate, ProductKeyGate
from comet_moe.kernels.descent import descend, read_trees
from comet_moe.kernels.grouped_mm import grouped_mm, grouped_mm_backward
from comet_moe.kernels.mix import gather_rows, mix
from comet_moe.mixture.dispatch import plan_from_routings
from comet_moe.routing import Routing

Part = tuple[str, Function]


@torch.no_grad()
def one_row() -> Iterator[Part]:
    """The COMET gate on one row, k=2, p=256, n=16; the reference is Top-k's three operators."""
    gate, x = hard_comet(256, 16), torch.randn(1, 256)
    width = gate.gamma
    assert isinstance(width, float)
    weight, bias = torch.randn(16, 256), torch.randn(16)
    parameters = (gate.split_weight, gate.split_bias, gate.leaf_weight, gate.leaf_bias)
    trees = read_trees(parameters, x.dtype)
    yield "the gate", lambda: gate(x)
    yield "its descent, with the arrays it returns", lambda: descend(x, trees, width)
    yield "two arrays, and tensors that share their memory", lambda: _two_tensors(1)
    yield "reading its parameters", lambda: read_trees(parameters, x.dtype)
    yield "reference", lambda: F.linear(x, weight, bias).topk(2, dim=-1)[0].softmax(-1)


def _two_tensors(rows: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 16, dtype=torch.int64), torch.zeros(rows, 16)


@torch.no_grad()
def dispatch(n: int, p: int, u: int) -> Iterator[Part]:
    """Sparse dispatch, forward, 512 rows per expert; the reference is one matrix product."""
    rows = 512 * n
    experts, gate = DenseExperts(n, p, u, activation="identity"), HashGate(rows, n)
    moe = MoE(experts=experts, gate=gate, execution="sparse")
    x, keys, weight = torch.randn(rows, p), torch.arange(rows), torch.randn(u, p)
    plan = plan_from_routings([gate(x, keys=keys)], rows)
    gathered = gather_rows(x, plan.row_sample, plan.layout)
    linear = experts.linear
    outputs = grouped_linear(gathered, linear.weight, linear.bias, plan.counts)
    slices = gathered.split(plan.counts)
    yield "dispatch", lambda: moe(x, keys=keys)
    yield (
        "the products of the slices",
        lambda: [s @ w.t() for s, w in zip(slices, linear.weight, strict=True)],
    )
    yield "gathering the rows", lambda: gather_rows(x, plan.row_sample, plan.layout)
    yield "the weighted sum", lambda: mix(outputs, plan.weights, plan.layout, experts.epilogue)
    yield "gate and plan", lambda: plan_from_routings([gate(x, keys=keys)], rows)
    yield "reference", lambda: x @ weight.t()


def uneven_products() -> Iterator[Part]:
    """Products of 16 experts of 256 x 256 with 40 to 230 rows; the reference is one product of all rows."""
    counts = [40, 48, 53, 59, 66, 79, 88, 101, 107, 126, 129, 142, 163, 205, 230, 230]
    rows, grad = torch.randn(sum(counts), 256), torch.randn(sum(counts), 256)
    weight, bias, stops = torch.randn(16, 256, 256), torch.randn(16, 256), torch.tensor(counts).cumsum(0)
    slices = [slice(stop - count, stop) for stop, count in zip(stops.tolist(), counts, strict=True)]
    yield "all experts in shares", lambda: grouped_mm(rows, weight, bias, stops)
    yield (
        "one expert after the other",
        lambda: [torch.addmm(b, rows[s], w.t()) for s, w, b in zip(slices, weight, bias, strict=True)],
    )
    yield "gradients, all experts in shares", lambda: grouped_mm_backward(grad, rows, weight, stops, True)
    yield (
        "gradients, one expert after the other",
        lambda: [
            (grad[s] @ w, grad[s].t() @ rows[s], grad[s].sum(0)) for s, w in zip(slices, weight, strict=True)
        ],
    )
    yield "reference", lambda: rows @ weight[0].t()


def small_experts() -> Iterator[Part]:
    """A step of 65,536 small experts, p=u=64, k=2, width 4; the reference is that behind product keys."""
    n, p = 2**16, 64
    experts, keys = NeuronExperts(n, p, p, WIDTH, sparse=True), ProductKeyGate(p, n, k=2)
    fixed = ProductKeyGate(p, n, k=2)
    expert, weight = torch.randint(n, (ROWS, 2)), torch.full((ROWS, 2), 0.5)
    routing = Routing.from_slots(expert, weight, torch.Size([ROWS]), n)
    fixed.forward = lambda x, keys=None, mask=None: routing  # type: ignore[method-assign]
    lazy, dense = LazyAdam(experts.parameters()), torch.optim.Adam(keys.parameters(), fused=True)
    yield "with fixed choices", make_layer_step(MoE(experts=experts, gate=fixed), p, [lazy])
    yield "reference", make_layer_step(MoE(experts=experts, gate=keys), p, [lazy, dense])


def show_ratios(title: str | None, parts: Sequence[Part], seconds: float, calls: int = 1) -> None:
    """Print the times of ``parts`` divided by the time of the last one, as a Markdown table."""
    print(f"| {title} | ratio | quartiles |\n|---|---|---|")
    ratios = measure_ratios([function for _, function in parts], seconds, calls)
    for (name, _), ratio in zip(parts[:-1], ratios, strict=True):
        print(f"| {name} | {ratio.value:.3f} | {ratio.low:.3f}-{ratio.high:.3f} |")
    print()


if __name__ == "__main__":
    with torch.no_grad():
        show_ratios(one_row.__doc__, list(one_row()), 8, 200)
        show_ratios(uneven_products.__doc__, list(uneven_products()), 10)
        with torch.enable_grad():
            show_ratios(small_experts.__doc__, list(small_experts()), 8)
        for shape in ((8, 256, 256), (16, 512, 512), (8, 768, 1024)):
            show_ratios(
                f"{dispatch.__doc__} n={shape[0]} p={shape[1]} u={shape[2]}", list(dispatch(*shape)), 15
            )
