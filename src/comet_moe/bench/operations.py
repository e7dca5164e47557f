"""Operations by closed form / operations that torch counts on the real execution."""

from collections.abc import Callable, Iterator

import torch
from torch.utils.flop_counter import FlopCounterMode

from comet_moe.bench.figure import Row
from comet_moe.bench.network import ITEMS, USERS, WIDTH, K, N, network
from comet_moe.gates import CometGate, DSelectKGate, Gate, HashGate, SoftmaxGate, TopKGate


@torch.no_grad()
def operations(quick: bool) -> Iterator[Row]:
    """Every gate, both executions, on the MovieLens network in evaluation."""
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
            case = f"{name}, {execution}, {closed / rows / 1000:.0f} K a sample"
            value = closed / counter.get_total_flops()
            yield Row("operations by closed form / counted", case, value, 1.0, exact=True)
