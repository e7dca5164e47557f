"""Floating-point operations by closed form / those that torch counts while the network runs."""

from collections.abc import Callable, Iterator

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.network import ITEMS, USERS, WIDTH, K, N, network
from benchmarks.result import Result
from comet_moe.gates import CometGate, DSelectKGate, Gate, HashGate, SoftmaxGate, TopKGate


@torch.no_grad()
def measure_operations(quick: bool) -> Iterator[Result]:
    """Every gate in both executions, on the MovieLens network in eval mode."""
    p = 2 * WIDTH
    gates: dict[str, Callable[[], Gate]] = {
        "softmax": lambda: SoftmaxGate(p, N),
        "hash": lambda: HashGate(USERS, N),
        "topk": lambda: TopKGate(p, N, K),
        "dselect": lambda: DSelectKGate(p, N, K),
        "comet": lambda: CometGate(p, N, K, gamma=0.01),
    }
    rows = 256
    features = {"user": torch.randint(USERS, (rows,)), "item": torch.randint(ITEMS, (rows,))}
    for name, make in gates.items():
        model = network([make(), make()]).eval()
        for gate in model.moe.gates:
            for parameter in gate.parameters():
                torch.nn.init.normal_(parameter)  # hard paths, as after training
        for execution in ("dense", "sparse"):
            model.moe.execution = execution
            _, routings = model(features)
            closed = model.flops(routings)
            with FlopCounterMode(display=False) as counter:
                model(features)
            case = f"{name}, {execution}, {closed / rows / 1000:.0f} K per sample"
            value = closed / counter.get_total_flops()
            yield Result("operations by closed form / counted", case, value, 1.0, exact=True)
