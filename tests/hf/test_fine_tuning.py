"""Which parameters train: routers, experts or adapters."""

from importlib.util import find_spec

import pytest
import torch
from dense_models import batch
from dense_models import build as build_dense
from mixture_families import IS_OLD
from tiny_models import FAMILIES, build, left_padded
from transformers import AutoModelForCausalLM

from comet_moe.gates import CometGate, TopKGate
from comet_moe.hf import replace_routers, train_only, upcycle

if find_spec("peft") is None:
    pytest.skip("needs peft, which the extra comet-moe[dev] has", allow_module_level=True)

from peft import LoraConfig


def train_two_steps(model, inputs):
    """The names of the parameters that change; the first step of LoRA leaves one factor without gradient."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
    model.eval()
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gate", [None, CometGate])
@pytest.mark.parametrize(("kind", "part"), [("routers", ".gate."), ("experts", ".experts.")])
def test_only_the_named_part_trains(family, gate, kind, part):
    model = build(family)
    if gate is not None:
        replace_routers(model, gate)
    found = train_only(model, kind)
    changed = train_two_steps(model, left_padded())
    assert changed
    assert all(f".mlp{part}" in name and "shared" not in name for name in changed)
    trains = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found.parameters == found.by_part[kind] == trains
    assert str(found).endswith(f"parameters train ({found.share:.2%}): {kind} {trains:,}")


def test_parts_of_an_upcycled_model_train():
    for kind, part in (("routers", ".gates.0."), ("experts", ".experts.members.")):
        model = build_dense("llama")
        upcycle(model, experts=2, k=2)
        found = train_only(model, kind)
        changed = train_two_steps(model, batch("llama"))
        assert found.by_part[kind] == found.parameters
        assert changed
        assert all(part in name for name in changed)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_reach_the_experts_of_every_mixture_by_default(family):
    model = build(family)
    found = train_only(model, "lora")
    changed = train_two_steps(model, left_padded())
    assert all("lora" in name for name in changed)
    assert any(".experts." in name for name in changed)
    assert any("self_attn" in name for name in changed)
    assert found.by_part["routers"] == 0 < found.by_part["experts"]


@pytest.mark.skipif(IS_OLD, reason="AutoModel loses modules_to_save before transformers 5.22")
def test_adapters_and_gates_that_train_together_are_saved_together(tmp_path):
    model = build("mixtral")
    replace_routers(model, CometGate)
    model.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    found = train_only(model, "lora", routers=True)
    assert found.by_part["routers"] == sum(
        p.numel() for name, p in model.named_parameters() if ".mlp.gate." in name and p.requires_grad
    )
    changed = train_two_steps(model, left_padded())
    assert any("leaf_weight" in name for name in changed)
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(again(**left_padded()).logits, model(**left_padded()).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_of_an_upcycled_model_reach_its_experts(family):
    model = build_dense(family)
    upcycle(model, experts=2, k=1)
    train_only(model, "lora")
    assert any("experts.members.1" in name for name in train_two_steps(model, batch(family)))


@pytest.mark.parametrize(
    "targets", [{"target_modules": ["q_proj", "up_proj", "gate_up_proj"]}, {"target_modules": ".*experts.*"}]
)
def test_targets_that_miss_stacked_experts_are_refused_before_anything_changes(targets):
    model = build("mixtral")
    message = (
        r"^no adapter reaches the experts model.layers.0.mlp.experts, .* "
        r"target_parameters=\['experts.down_proj', 'experts.gate_up_proj'\]$"
    )
    with pytest.raises(ValueError, match=message):
        train_only(model, "lora", lora=LoraConfig(**targets))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_gates_that_the_loss_does_not_train_are_refused():
    model = build_dense("llama")
    with pytest.warns(UserWarning, match="does not train"):
        upcycle(model, experts=2, k=1, gate=TopKGate)
    with pytest.raises(ValueError, match=r"^the loss does not train 2 routers, such as model.layers.0"):
        train_only(model, "routers")


def test_routers_of_one_expert_with_the_weight_1_are_refused():
    with pytest.raises(ValueError, match=r"^the loss does not train 2 routers, such as model.layers.0.mlp"):
        train_only(build("mixtral", num_experts_per_tok=1), "routers")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "gates"}, r'^kind must be "routers", "experts" or "lora", got \'gates\'$'),
        ({"kind": "experts", "routers": True}, r'^lora and routers are for kind "lora", got \'experts\'$'),
    ],
)
def test_wrong_settings_are_one_sentence(settings, message):
    with pytest.raises(ValueError, match=message):
        train_only(build("mixtral"), **settings)


def test_a_dense_model_is_refused():
    with pytest.raises(ValueError, match="has no mixtures"):
        train_only(build_dense("llama"), "routers")
