"""Gates by name: what each name builds, its defaults, and combinations that are refused."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
import torch
from gate_laws import COMPILED, check_laws

from comet_moe import Routing
from comet_moe.exceptions import RecipeError
from comet_moe.experiments.config import load_train_config
from comet_moe.gates import (
    CometGate,
    DSelectKGate,
    Gate,
    HashGate,
    RegularizedGate,
    ReluGate,
    TopKGate,
    UniformGate,
    WarmupGate,
    build_gate,
    register_gate,
)
from comet_moe.gates.registry import Positive, find_gate, gate_kinds, gate_names, registered_gates
from comet_moe.testing import check_gate


@COMPILED
@pytest.mark.parametrize("kind", gate_kinds())
def test_every_name_builds_a_gate_that_keeps_the_laws(kind, compiled):
    check_laws(lambda p, n: build_gate(kind, p, n, num_keys=40), compiled)


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


def test_names_are_in_the_order_of_tables_and_their_files_register_them():
    kinds = ["softmax", "hash", "hash-k", "topk", "switch", "sigmoid", "dselect", "relu"]
    kinds += ["product-keys", "comet"]
    assert list(gate_kinds()) == ["dense", "dense-wide", "dense-per-task", *kinds]
    assert [gate.name for gate in registered_gates()] == kinds
    assert [name for name in gate_names() if name.endswith("+")] == [f"{kind}+" for kind in kinds]


def test_a_record_says_what_the_gate_needs_and_has():
    assert [gate.name for gate in registered_gates() if gate.needs_keys] == ["hash", "hash-k"]
    assert [gate.name for gate in registered_gates() if gate.has_trees] == ["dselect", "comet"]
    limited = ["hash-k", "topk", "sigmoid", "relu", "product-keys"]
    assert [gate.name for gate in registered_gates() if gate.limits_k] == limited
    without_logits = ["hash", "hash-k", "dselect", "product-keys", "comet"]
    assert [gate.name for gate in registered_gates() if not gate.has_logits] == without_logits


class FirstGate(Gate):
    """The first k experts.

    Args:
        num_experts: n.
        k: experts per row.
        scale: factor
            on the weights.
        mode: one of two.
    """

    def __init__(
        self, num_experts: int, k=2, scale: Positive = 1.0, mode: Literal["a", "b"] | None = None, **rest
    ):
        super().__init__()
        self.num_experts, self.k, self.scale, self.mode = num_experts, k, scale, mode

    def forward(self, x, keys=None, mask=None):
        return Routing(weights=torch.ones(*x.shape[:-1], self.num_experts) / self.num_experts)


def test_one_decorator_makes_a_gate_known_with_its_settings():
    assert register_gate("first")(FirstGate) is FirstGate
    assert gate_names()[-2:] == ("first", "first+")
    gate = find_gate("first+")
    assert (gate.needs_keys, gate.has_logits, gate.has_trees, gate.limits_k) == (False, None, False, True)
    assert list(gate.settings) == ["k", "scale", "mode"]
    assert gate.settings["k"].kind is int  # from its default
    assert gate.settings["scale"].limits.above == 0
    assert gate.settings["scale"].meaning == "factor on the weights"
    built = build_gate("first", 8, 4, k=3, scale=2.0, load_balance=0.1)
    assert (built.gate.k, built.gate.scale) == (3, 2.0)


def test_recipes_validate_the_settings_of_ones_own_gate():
    register_gate("first")(FirstGate)
    config = load_train_config("multidigits", ["gate=first+", "gate.scale=2"])
    assert config.gate.model_dump(include={"name", "k", "scale", "mode"}) == {
        "name": "first+",
        "k": 2,  # of the recipe's Top-k
        "scale": 2.0,
        "mode": None,
    }
    for setting, message in {
        "gate.scale=0": "gate.scale: input should be greater than 0, got 0",
        "gate.mode=c": "gate.mode: input should be 'a' or 'b', got 'c'",
        "gate.gamma=1": "the gate first has no setting gamma",
        "gate.k=9": "gate.k must be at most 8, the number of experts",
    }.items():
        with pytest.raises(RecipeError, match=message):
            load_train_config("multidigits", ["gate=first", setting])


def test_a_gate_that_is_defined_again_replaces_the_first_and_another_does_not():
    def define():
        class Again(FirstGate):
            pass

        return Again

    register_gate("first")(define())
    second = register_gate("first")(define())
    assert find_gate("first").build is second
    with pytest.raises(ValueError, match=r"the gate first is registered by .*Again already"):
        register_gate("first")(FirstGate)
    with pytest.raises(ValueError, match=r"the gate topk is registered by comet_moe\.gates\.top_k.* already"):
        register_gate("topk")(FirstGate)


@pytest.mark.parametrize("name", ["dense", "Mine", "mine+", "a b", ""])
def test_names_that_cannot_be_folders_or_are_taken_are_refused(name):
    with pytest.raises(ValueError, match="the name of a gate has lower-case letters"):
        register_gate(name)


def test_only_gates_over_experts_can_be_registered():
    with pytest.raises(ValueError, match="is for a subclass of Gate"):
        register_gate("mine")(dict)
    with pytest.raises(ValueError, match="must take num_experts"):
        register_gate("mine")(type("Sizeless", (FirstGate,), {"__init__": lambda self: None}))


def test_a_setting_that_the_gate_does_not_have_is_named():
    with pytest.raises(ValueError, match=r"the gate comet has no setting noise: .* k, gamma, entropy"):
        build_gate("comet", 8, 4, noise=True)


@pytest.mark.parametrize("gate", [HashGate(8, 4), CometGate(8, 4), WarmupGate(DSelectKGate(8, 4), steps=2)])
def test_a_z_loss_without_logits_is_refused_at_construction(gate):
    with pytest.raises(ValueError, match=r"z_loss is 1, and .* has no router logits: set z_loss to 0"):
        RegularizedGate(gate, z_loss=1)


def test_the_gate_of_the_page_keeps_the_laws(monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "gates.md"
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where pickle looks for the class
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(page), "exec"), vars(module))
    check_gate(lambda p, n: build_gate("nearest", p, n, sharpness=2.0))
