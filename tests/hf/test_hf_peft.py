"""LoRA by peft on models with gates: on attention while the gates train, and on experts."""

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from dense_models import batch
from dense_models import build as build_dense
from mixture_families import IS_OLD
from tiny_models import build, left_padded
from transformers import AutoModelForCausalLM

from comet_moe.gates import CometGate, HashGate
from comet_moe.hf import replace_routers, upcycle

if find_spec("peft") is None:
    pytest.skip("needs peft, which the extra comet-moe[dev] has", allow_module_level=True)
peft = import_module("peft")


def train_a_step(model, inputs):
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):  # in the first step one factor of each adapter is 0, and the other gets no gradient
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()
    model.eval()
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def with_labels(inputs):
    return {**inputs, "labels": inputs["input_ids"]}


def loaded(folder):
    """Model and adapter, by peft."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    return peft.PeftModel.from_pretrained(model, folder / "adapter").eval()


def lora(**settings):
    return peft.LoraConfig(r=2, lora_alpha=4, task_type="CAUSAL_LM", **settings)


def test_attention_has_adapters_while_the_gates_train(tmp_path):
    model = build("mixtral")
    replace_routers(model, CometGate)
    model.save_pretrained(tmp_path / "model")
    tuned = peft.get_peft_model(
        model, lora(target_modules=["q_proj", "v_proj"], modules_to_save=["mlp.gate"])
    )
    changed = train_a_step(tuned, with_labels(left_padded()))
    assert any("lora_A" in name for name in changed)
    assert any("leaf_weight" in name for name in changed)
    assert all("lora" in name or "modules_to_save" in name for name in changed)

    tuned.save_pretrained(tmp_path / "adapter")
    again = loaded(tmp_path)
    with torch.no_grad():
        wanted = tuned(**left_padded()).logits
        torch.testing.assert_close(again(**left_padded()).logits, wanted)


@pytest.mark.skipif(IS_OLD, reason="AutoModel loses modules_to_save before transformers 5.22")
def test_the_folder_of_an_adapter_opens_with_its_model(tmp_path):
    model = build("mixtral")
    replace_routers(model, CometGate)
    model.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")  # whose name the adapter remembers
    tuned = peft.get_peft_model(model, lora(target_modules=["q_proj"], modules_to_save=["mlp.gate"]))
    train_a_step(tuned, with_labels(left_padded()))
    tuned.save_pretrained(tmp_path / "adapter")
    by_peft = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    by_transformers = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        wanted = tuned(**left_padded()).logits
        for again in (by_peft, by_transformers):
            torch.testing.assert_close(again(**left_padded()).logits, wanted)


def test_experts_have_adapters_by_target_parameters(tmp_path):
    model = build("mixtral")
    replace_routers(model, lambda p, n, k: HashGate(model.config.vocab_size, n))
    model.save_pretrained(tmp_path / "model")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    tuned = peft.get_peft_model(model, lora(target_modules=[], target_parameters=targets, lora_dropout=0.0))
    changed = train_a_step(tuned, with_labels(left_padded()))
    assert changed
    assert all("lora" in name for name in changed)

    tuned.save_pretrained(tmp_path / "adapter")
    again = loaded(tmp_path)
    with torch.no_grad():
        wanted = tuned(**left_padded()).logits
        torch.testing.assert_close(again(**left_padded()).logits, wanted)
        merged = tuned.merge_and_unload()
        # W + BA in one product, or in two.
        torch.testing.assert_close(merged(**left_padded()).logits, wanted, atol=1e-4, rtol=1e-4)


def test_the_experts_of_an_upcycled_model_have_adapters_by_module(tmp_path):
    model = build_dense("llama")
    upcycle(model, experts=2, k=1, gate="comet")
    model.save_pretrained(tmp_path / "model")
    tuned = peft.get_peft_model(model, lora(target_modules=["up_proj"], modules_to_save=["gates.0"]))
    changed = train_a_step(tuned, batch("llama", labels=True))
    assert any("experts.members.1.up_proj.lora_A" in name for name in changed)
    assert any("leaf_weight" in name for name in changed)

    tuned.save_pretrained(tmp_path / "adapter")
    again = loaded(tmp_path)
    with torch.no_grad():
        inputs = batch("llama")
        torch.testing.assert_close(again(**inputs).logits, tuned(**inputs).logits)
