"""Floating-point operations per sample, counted while the network runs: the appendix's cost table.

Matrix products and convolutions are counted, a multiplication and an addition as two operations, by torch's
own counter on the execution that the network really takes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from comet_moe.checks import without_value_checks
from comet_moe.config import TrainConfig
from comet_moe.data import Dataset
from comet_moe.gates import CometGate, DSelectKGate
from comet_moe.training.batches import take
from comet_moe.training.build import Model, build_model, steps_per_epoch

ROWS = 2048
"""Rows of the test split that are run."""

HARD = 1e-3  # a γ that leaves next to no split soft where weights are of the size of 1


@dataclass(frozen=True)
class Cost:
    """Operations per sample of one forward pass, by part.

    Attributes:
        gate: all gates.
        experts: those that ran.
        shared: the layers that every sample takes, here the heads.
        experts_per_sample: mean over gates, as in the paper's n/s.
    """

    gate: float
    experts: float
    shared: float
    experts_per_sample: float

    @property
    def total(self) -> float:
        """Of the whole network."""
        return self.gate + self.experts + self.shared


def costs(model: Model, dataset: Dataset) -> dict[str, Cost]:
    """The forward pass on test rows in "training" and at "inference"."""
    features = take(dataset.test, slice(0, ROWS)).features
    return {
        "training": _cost(model.train(), features),
        "inference": torch.no_grad()(_cost)(model.eval(), features),
    }


def hardened_model(config: TrainConfig, dataset: Dataset) -> Model:
    """An untrained network whose trees and selectors are hard, as training leaves them."""
    model = build_model(config, dataset.meta, steps_per_epoch(config, dataset.meta))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        for gate in model.moe.modules():
            if isinstance(gate, CometGate | DSelectKGate):
                gate.gamma = HARD
                for parameter in gate.parameters():
                    nn.init.normal_(parameter)
    return model


@without_value_checks()
def _cost(model: Model, features: dict[str, Tensor]) -> Cost:
    """One batch, as a whole and then part by part, each part on what it got."""
    seen: dict[str, Any] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.update(x=args[0], kwargs=kwargs, mixed=output[0], routings=output[1])

    handle = model.moe.register_forward_hook(keep, with_kwargs=True)
    try:
        total = _counted(lambda: model(features))
    finally:
        handle.remove()
    x = seen["x"].flatten(1)
    gate = sum(_counted(partial(gate, x, **seen["kwargs"])) for gate in model.moe.gates)
    shared = sum(_counted(partial(head, y)) for head, y in zip(model.heads, seen["mixed"], strict=True))
    rows = len(seen["x"])
    used = [routing.statistics()["experts_per_sample"] for routing in seen["routings"]]
    return Cost(gate / rows, (total - gate - shared) / rows, shared / rows, sum(used) / len(used))


def _counted(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())
