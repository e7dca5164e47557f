"""What threads and bfloat16 give: steps of the MovieLens network and of convolutional experts."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks.network import CASE, make_bound, make_dense_network, make_sparse_network, make_step
from benchmarks.result import Result, timed_result
from benchmarks.timing import Function, measure_ratio
from comet_moe import MoE
from comet_moe.devices import Placement
from comet_moe.experts import ConvExperts
from comet_moe.gates import TopKGate


def on_threads(threads: int, function: Function) -> Function:
    """``function`` with so many of torch's threads."""

    def run() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            function()
        finally:
            torch.set_num_threads(before)

    return run


def measure_threads(quick: bool) -> Iterator[Result]:
    """The sparse step on two threads / on one, and its products and optimiser, which bound it."""
    seconds = 3 if quick else 20
    model = make_sparse_network()
    for name, run, target in (
        ("MovieLens sparse step, two threads / one", make_step(model), 0.55),
        ("its products and optimiser, two threads / one", make_bound(model), float("inf")),
    ):
        ratio = measure_ratio(on_threads(2, run), on_threads(1, run), seconds)
        yield timed_result(name, CASE, ratio, target)


def measure_bfloat16(quick: bool) -> Iterator[Result]:
    """A step in bfloat16 / in float32, and a product of 512 x 256 x 256, which bounds it."""
    seconds = 3 if quick else 15
    autocast = Placement(precision="bfloat16").autocast
    for name, model, target in (
        ("dense", make_dense_network(), 0.65),
        ("sparse", make_sparse_network(), 0.75),
    ):
        step = make_step(model)

        def in_bfloat16(step: Function = step) -> None:
            with autocast():
                step()

        ratio = measure_ratio(in_bfloat16, step, seconds)
        yield timed_result(f"MovieLens {name} step, bfloat16 / float32", CASE, ratio, target)
    x, weight = torch.randn(512, 256), torch.randn(256, 256)
    short_x, short_weight = x.bfloat16(), weight.bfloat16()
    ratio = measure_ratio(lambda: short_x @ short_weight, lambda: x @ weight, seconds / 3, 20)
    yield timed_result("one product, bfloat16 / float32", "512 x 256 x 256", ratio, float("inf"))


def measure_convolutions(quick: bool) -> Iterator[Result]:
    """A step of convolutional experts, 2 of 8 / all 8."""
    experts = ConvExperts(8, (1, 28, 28), filters=(16, 32), kernel_size=3, units=(64,))
    moe = MoE(experts=experts, gate=TopKGate(28 * 28, 8, k=2))
    x = torch.randn(256, 1, 28, 28)

    def step(execution: str) -> Callable[[], None]:
        def run() -> None:
            moe.execution = execution  # type: ignore[assignment]
            nn.Module.zero_grad(moe)
            moe(x)[0].sum().backward()

        return run

    ratio = measure_ratio(step("sparse"), step("dense"), 3 if quick else 15)
    yield timed_result("ConvExperts sparse (2 of 8) / dense step", "256 images 28x28", ratio, 0.4)
