"""A run that starts with one expert and grows: ``training.grow_at``.

The mixture of the first epochs has one expert, the first one, and no gate. When it grows, every expert is a
copy of that one. The rest of the network stays as it is.
"""

import copy

import torch
from torch import nn
from torch.optim import Optimizer

from comet_moe.experiments.models import Model
from comet_moe.experts import Experts
from comet_moe.gates import UniformGate
from comet_moe.mixture.moe import MultiGateMoE
from comet_moe.optimization import Growth


class GrowingMixture:
    """Puts a mixture of one expert in the place of that of ``model``, until :meth:`grow`.

    Args:
        model: a network with one ``MultiGateMoE``; it is changed.
    """

    def __init__(self, model: Model):
        grown = model.moe
        assert isinstance(grown, MultiGateMoE)  # the configuration refuses others
        self.model = model
        self.grown = grown
        self.dense = MultiGateMoE(
            experts=_first_expert(grown.experts),
            gates=[UniformGate(1) for _ in grown.gates],
            execution="dense",
        )
        model.moe = self.dense

    def grow(self, optimizer: Optimizer, gate_lr: float | None) -> None:
        """Copy the expert, and its state in ``optimizer``; see :class:`~comet_moe.optimization.Growth`."""
        old, new = self.dense.experts.parameters(), self.grown.experts.parameters()
        pairs = list(zip(old, new, strict=True))
        with torch.no_grad():
            for one, many in pairs:
                many.copy_(one.expand_as(many))
        self.model.moe = self.grown
        Growth(optimizer, gate_lr=gate_lr).apply({one: [many] for one, many in pairs}, self.grown.gates)


def _first_expert(experts: Experts) -> Experts:
    """A stack of the first of ``experts``, whose parameters all have one row per expert."""
    one = copy.deepcopy(experts)
    one.num_experts = 1
    for module in one.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(parameter.detach()[:1].clone()))
    return one
