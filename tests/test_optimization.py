"""The groups of an optimiser."""

import pytest
import torch
from torch import nn

from comet_moe import MoE, Permutation, PermutedGate, parameter_groups
from comet_moe.experts import DenseExperts
from comet_moe.gates import TopKGate


def build():
    gate = PermutedGate(TopKGate(4, 3, k=2), Permutation(3, steps=5, lr_factor=10.0))
    return nn.Sequential(nn.Linear(4, 4), MoE(experts=DenseExperts(3, 4, 4), gate=gate, return_routing=False))


def test_gates_searches_and_the_rest_have_their_own_rate_and_gates_do_not_decay():
    model = build()
    gate = model[1].gate
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1, gate_lr=0.3), weight_decay=0.5)
    found = {
        id(p): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    wanted = {id(p): (0.1, 0.5) for p in model.parameters()}
    wanted |= {id(p): (0.3, 0.0) for p in gate.gate.parameters()} | {id(gate.search.logits): (1.0, 0.0)}
    assert found == wanted
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_the_rate_of_gates_is_that_of_the_model_by_default_and_their_decay_can_be_given():
    groups = parameter_groups(build(), 0.1, gate_weight_decay=0.2)
    assert [(group["lr"], group.get("weight_decay")) for group in groups] == [
        (0.1, None),
        (0.1, 0.2),
        (1.0, 0.2),
    ]


def test_a_model_without_gates_has_one_group():
    assert len(parameter_groups(nn.Linear(2, 2), 0.1)) == 1


@pytest.mark.parametrize("name", ["gate_lr", "gate_weight_decay"])
def test_rates_below_0_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be a finite number of at least 0"):
        parameter_groups(build(), 0.1, **{name: -1.0})
