"""What threads and bfloat16 give: steps of the MovieLens network and of convolutional experts."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks.network import CASE, make_bound, make_dense_network, make_sparse_network, make_step
from benchmarks.result import Result, timed_result
from benchmarks.timing import Function, measure_ratio
from comet_moe import MoE
from comet_moe.devices import Placement
from comet_moe.experiments.models import ImageModel, image_tasks
from comet_moe.experts import ConvExperts
from comet_moe.gates import CometGate, TopKGate
from comet_moe.kernels.pooled_convolution import channels_last


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
    """A step of convolutional experts: 2 of 8 / all 8, and 16 experts of MultiMNIST / their convolutions."""
    seconds = 3 if quick else 15
    experts = ConvExperts(8, (1, 28, 28), filters=(16, 32), kernel_size=3, units=(64,))
    moe = MoE(experts=experts, gate=TopKGate(28 * 28, 8, k=2))
    x = torch.randn(256, 1, 28, 28)

    def step(execution: str) -> Callable[[], None]:
        def run() -> None:
            moe.execution = execution  # type: ignore[assignment]
            nn.Module.zero_grad(moe)
            moe(x)[0].sum().backward()

        return run

    ratio = measure_ratio(step("sparse"), step("dense"), seconds)
    yield timed_result("ConvExperts sparse (2 of 8) / dense step", "256 images 28x28", ratio, 0.4)
    for name, gamma in (("all experts", 0.1), ("hard trees", 1e-3)):
        model_step, bound, pairs = _multimnist(gamma)
        ratio = measure_ratio(model_step, bound, seconds)
        case = f"{name}, {pairs} pairs of 512 images and 16 experts"
        yield timed_result("MultiMNIST step / its convolutions by oneDNN", case, ratio, 1.5)


def _multimnist(gamma: float) -> tuple[Function, Function, int]:
    """A step of the paper's network, its convolutions alone (every expert has an equal share), the pairs."""
    experts = ConvExperts(16, (1, 36, 36), filters=(10, 20), kernel_size=5, units=(50, 50))
    gates = [CometGate(36 * 36, 16, k=4, gamma=gamma) for _ in range(2)]
    for gate in gates:
        nn.init.normal_(gate.split_weight)
    tasks = image_tasks({"left": 10, "right": 10})
    model = ImageModel(tasks=tasks, experts=experts, gates=gates, head_units=(50, 50))
    features = {"image": torch.randint(256, (512, 1, 36, 36), dtype=torch.uint8)}
    targets = {task.name: torch.randint(10, (512,)) for task in tasks}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        outputs, routings = model(features)
        losses = [task.loss(output, targets)[0] for task, output in zip(tasks, outputs, strict=True)]
        (sum(losses) + sum(routing.aux_loss for routing in routings)).backward()
        optimizer.step()

    with torch.no_grad():
        _, routings = model(features)
    pairs = int(torch.stack([routing.weights != 0 for routing in routings]).any(0).sum())
    layers = []
    for channels, side, filters in ((1, 36, 10), (10, 16, 20)):
        images = channels_last(torch.rand(pairs // 16, channels, side, side)).requires_grad_(channels > 1)
        kernel = channels_last(torch.rand(filters, channels, 5, 5)).requires_grad_()
        layers.append((images, kernel, channels_last(torch.rand_like(torch.conv2d(images, kernel)))))

    def convolutions() -> None:
        for images, kernel, grad in 16 * layers:
            images.grad = kernel.grad = None
            torch.conv2d(images, kernel).backward(grad)

    return step, convolutions, pairs
