"""Floating-point operations per sample, counted while the network runs: the cost table of the appendix.

Matrix products and convolutions are counted by torch, a multiplication and an addition as two operations, on
the execution (dense or sparse) that the network takes.
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
from comet_moe.models import Model
from comet_moe.training.batches import take_rows
from comet_moe.training.build import build_model

ROWS = 2048
"""Rows of the test split on which operations are counted."""

HARD_GAMMA = 1e-3  # leaves almost no split soft where weights are standard normal


@dataclass(frozen=True)
class Cost:
    """Operations per sample of one forward pass.

    Attributes:
        gate: operations of all gates.
        experts: operations of the experts that ran.
        shared: operations of the layers that every sample passes, here the heads.
        experts_per_sample: experts selected per sample, mean over the gates; n/s in the paper.
    """

    gate: float
    experts: float
    shared: float
    experts_per_sample: float

    @property
    def total(self) -> float:
        """Operations of the whole network."""
        return self.gate + self.experts + self.shared


def count_costs(model: Model, dataset: Dataset) -> dict[str, Cost]:
    """The cost of a forward pass on test rows, in "training" and at "inference"."""
    features = take_rows(dataset.test, slice(0, ROWS)).features
    return {
        "training": _count_cost(model.train(), features),
        "inference": torch.no_grad()(_count_cost)(model.eval(), features),
    }


def build_hard_model(config: TrainConfig, dataset: Dataset) -> Model:
    """An untrained network with hard trees and selectors, as training makes them."""
    model = build_model(config, dataset.meta)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        for gate in model.moe.modules():
            if isinstance(gate, CometGate | DSelectKGate):
                gate.gamma = HARD_GAMMA
                for parameter in gate.parameters():
                    nn.init.normal_(parameter)
    return model


@without_value_checks()
def _count_cost(model: Model, features: dict[str, Tensor]) -> Cost:
    """The cost of one batch: in total, then of gates and heads on the inputs that they had."""
    seen: dict[str, Any] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.update(x=args[0], kwargs=kwargs, mixed=output[0], routings=output[1])

    handle = model.moe.register_forward_hook(keep, with_kwargs=True)
    try:
        total = _count_flops(lambda: model(features))
    finally:
        handle.remove()
    x = seen["x"].flatten(1)
    gate = sum(_count_flops(partial(gate, x, **seen["kwargs"])) for gate in model.moe.gates)
    shared = sum(_count_flops(partial(head, y)) for head, y in zip(model.heads, seen["mixed"], strict=True))
    rows = len(seen["x"])
    experts = [routing.statistics()["experts_per_sample"] for routing in seen["routings"]]
    return Cost(gate / rows, (total - gate - shared) / rows, shared / rows, sum(experts) / len(experts))


def _count_flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())
