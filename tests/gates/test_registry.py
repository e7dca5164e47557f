"""Gates by name: what each name builds, its defaults, and combinations that are refused."""

import pytest
import torch

from comet_moe.gates import (
    CometGate,
    RegularizedGate,
    ReluGate,
    TopKGate,
    UniformGate,
    WarmupGate,
    build_gate,
)
from comet_moe.gates.registry import gate_kinds
from comet_moe.testing import check_gate


@pytest.mark.parametrize("kind", gate_kinds())
def test_every_name_builds_a_gate_that_keeps_the_laws(kind):
    check_gate(lambda p, n: build_gate(kind, p, n, num_keys=40))


def test_names_stand_for_gates_with_their_defaults():
    switch = build_gate("switch", 8, 4)
    assert isinstance(switch, RegularizedGate)
    assert (switch.regularizer.load_balance, switch.gate.k, switch.gate.normalize) == (0.01, 1, "all")
    sigmoid = build_gate("sigmoid", 8, 4, k=3)
    assert (sigmoid.score, sigmoid.bias_update, sigmoid.k) == ("sigmoid", 1e-3, 3)
    assert isinstance(build_gate("relu", 8, 4, k=3), ReluGate)
    assert isinstance(build_gate("dense", 8, 1), UniformGate)
    assert isinstance(build_gate("switch", 8, 4, load_balance=0.0), TopKGate)


def test_losses_and_warm_up_wrap_the_gate():
    gate = build_gate("comet", 8, 4, entropy=0.5, information=1.0, warmup_steps=3)
    assert isinstance(gate, WarmupGate)
    assert isinstance(gate.gate, RegularizedGate)
    assert isinstance(gate.gate.gate, CometGate)
    assert gate.gate.gate.entropy == 0  # the information loss has this part
    assert build_gate("comet", 8, 4, entropy=0.5).entropy == 0.5


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("hash", {}, "a hash gate needs keys such as users"),
        ("comet", {"z_loss": 0.1}, "the gate comet has no logits for a z-loss: set z_loss to 0"),
        ("topk", {"groups": 3}, "groups must divide the number of experts, 4, got 3"),
        ("mystery", {}, "gate must be one of dense, .*, got 'mystery'"),
    ],
)
def test_wrong_combinations_are_one_sentence(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        build_gate(kind, 8, 4, **settings)


def test_hash_gates_differ_by_seed():
    first, second = (build_gate("hash", 8, 4, num_keys=50, seed=seed) for seed in (0, 1))
    keys, x = torch.arange(50), torch.zeros(50, 1)
    assert not torch.equal(first(x, keys=keys).weights, second(x, keys=keys).weights)
