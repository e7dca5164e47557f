"""Floating-point operations per sample, counted while the network runs: the cost table of the appendix.

Torch counts the matrix products and convolutions of the execution that the network takes, dense or sparse. A
multiplication and an addition are two operations. The weighted sums of expert outputs do not count: for some
shapes they are products of torch, for others a loop that torch cannot count.
"""

from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from comet_moe.checks import without_value_checks
from comet_moe.experiments.config import TrainConfig
from comet_moe.experiments.data import Dataset
from comet_moe.experiments.models import Model
from comet_moe.experiments.models.build import build_model
from comet_moe.experiments.training.batches import take_rows
from comet_moe.experts import Experts
from comet_moe.gates import CometGate, DSelectKGate
from comet_moe.mixture.moe import MultiGateMoE
from comet_moe.mixture.ple import CGC
from comet_moe.routing import Routing

ROWS = 2048
"""Rows of the test split on which operations are counted."""

HARD_GAMMA = 1e-3  # leaves almost no split soft where weights are standard normal


@dataclass(frozen=True)
class Cost:
    """Operations per sample of one forward pass.

    Attributes:
        gate: operations of all gates.
        experts: operations of the experts that ran.
        shared: operations of the layers that every sample passes: heads, and embeddings of numbers.
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
    """The cost of one batch, from the operations that each module was counted with."""
    with FlopCounterMode(display=False) as counter:
        routings: list[Routing] = model(features)[1]
    counts = counter.get_flop_counts()

    def count(name: str) -> int:
        return sum(counts.get(f"{type(model).__name__}.{name}", {}).values())

    gates = experts = 0
    for name, module in model.named_modules():
        if isinstance(module, MultiGateMoE | CGC):
            gates += sum(count(f"{name}.gates.{index}") for index in range(len(module.gates)))
        elif isinstance(module, Experts):
            experts += count(name)
    rows = routings[0].batch_shape[0]
    per_sample = fmean(routing.statistics()["experts_per_sample"] for routing in routings)
    shared = counter.get_total_flops() - count("moe")
    return Cost(gates / rows, experts / rows, shared / rows, per_sample)
