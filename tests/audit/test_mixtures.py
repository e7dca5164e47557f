"""Mixtures of every kind behind one interface: their routes are seen and replaced."""

import dense_models
import pytest
import tiny_models
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from comet_moe import MoE, MultiGateMoE, audit, intervene, routing_gain
from comet_moe.audit.language import language_loss
from comet_moe.experts import DenseExperts
from comet_moe.gates import CometGate, HashGate, RegularizedGate, TopKGate
from comet_moe.hf import replace_routers, upcycle
from comet_moe.mixture.visits import find_mixtures, visiting

FAMILIES = {
    "mixtral": tiny_models.mixtral,
    "qwen2": tiny_models.qwen2,
    "qwen3": tiny_models.qwen3,
    "olmoe": tiny_models.olmoe,
    "deepseek": tiny_models.deepseek,
}
OTHERS = (
    "deepseek_v2",
    "dots1",
    "flex_olmo",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "hunyuan_v1_moe",
    "minimax",
)
OTHERS += ("minimax_m2", "phimoe")
SIZES = {
    **tiny_models.COMMON,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "moe_intermediate_size": 12,
    "head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "moe_topk": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
}
IDS = torch.arange(3, 3 + 24).reshape(2, 12)


def seen(model, *arguments, **keywords):
    calls = []
    mixtures = find_mixtures(model)
    with torch.no_grad(), visiting(model, mixtures, lambda mixture, call: calls.append((mixture, call))):
        model(*arguments, **keywords)
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_that_are_seen_make_the_output_of_the_experts(family):
    model = FAMILIES[family]().eval()
    for mixture, call in seen(model, input_ids=IDS):
        assert call.tokens.shape == (2, 12)
        assert mixture.gate_parameters
        rows, weights = call.inputs, call.routing.weights
        with torch.no_grad():
            by_expert = torch.stack([mixture.run(i, rows) for i in range(mixture.num_experts)], 1)
            value, index = weights.topk(int((weights != 0).sum(-1).max()))
            torch.testing.assert_close(
                (weights.unsqueeze(-1) * by_expert).sum(1), mixture.experts(rows, index, value)
            )


def build(family):
    """A tiny model: with the sizes that the configuration of its family knows."""
    if family in FAMILIES:
        return FAMILIES[family]()
    known = type(AutoConfig.for_model(family)).__dataclass_fields__
    sizes = {name: size for name, size in SIZES.items() if name in known}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_the_same_routes_again_change_nothing_and_others_do(family):
    model = build(family).eval()
    mixtures = find_mixtures(model)
    assert all(mixture.gate_parameters for mixture in mixtures)
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        with visiting(model, mixtures, lambda mixture, call: call.routing.weights):
            torch.testing.assert_close(model(input_ids=IDS).logits, before)
        with intervene(model, "shuffle"):
            assert not torch.allclose(model(input_ids=IDS).logits, before)
        assert torch.equal(model(input_ids=IDS).logits, before)


def test_gates_that_replaced_routers_are_seen_at_the_experts():
    model = tiny_models.mixtral().eval()
    plain = [call.routing.weights for _, call in seen(model, input_ids=IDS)]
    replace_routers(model)
    replaced = seen(model, input_ids=IDS)
    assert len(replaced) == len(plain)
    for (_, call), weights in zip(replaced, plain, strict=True):
        torch.testing.assert_close(call.routing.weights, weights)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_routing_gain_exchanges_the_routes_of_routers_of_transformers_too(is_replaced):
    model = tiny_models.mixtral().eval()
    if is_replaced:
        replace_routers(model)
    found = routing_gain(
        model, [{"input_ids": IDS}], lambda model, batch: language_loss(model, padded(batch))
    )
    assert list(found["by_gate"]) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert found["gain"] != 0


def padded(batch):
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def test_one_gate_per_task_is_one_mixture_per_task_and_a_hash_gate_has_no_parameters():
    gates = [CometGate(8, 4, k=1), HashGate(10, 4)]
    moe = MultiGateMoE(experts=DenseExperts(4, 8, 8), gates=gates)
    first, second = find_mixtures(moe)
    assert (first.name, second.name) == ("gates.0", "gates.1")
    assert first.gate_parameters
    assert not second.gate_parameters
    calls = seen(moe, torch.randn(5, 8), keys=torch.arange(5), mask=torch.tensor([1, 1, 1, 1, 0]).bool())
    for _, call in calls:
        assert call.real_rows().tolist() == [0, 1, 2, 3]
        assert not call.routing.weights[4].any(), "gates do not route padding"


def test_copies_of_a_dense_layer_are_equal_experts_and_their_gate_routes_no_padding():
    model = dense_models.llama()
    upcycle(model, experts=4, k=1, gate="topk")
    mask = torch.ones_like(IDS)
    mask[:, -3:] = 0
    report = audit(model, [{"input_ids": IDS, "attention_mask": mask}], language_loss, routes=0)
    codes = {finding.code for finding in report.findings}
    assert "equal-experts" in codes
    assert "padding-routed" not in codes
    assert report.layers[0].statistics["samples"] == 18


def test_packed_sequences_start_again_at_position_0():
    model = tiny_models.mixtral().eval()
    position = torch.arange(6).repeat(2, 2)
    (_, call), *_ = seen(model, input_ids=IDS, position_ids=position)
    assert torch.equal(call.tokens.position, position.flatten())


def test_the_auxiliary_loss_of_gates_is_found_once_or_twice():
    gate = RegularizedGate(TopKGate(8, 4, k=2), load_balance=0.1)
    moe = MoE(experts=DenseExperts(4, 8, 8), gate=gate)
    batches = [(torch.randn(64, 8), torch.randn(64, 8))]

    def loss(model, batch):
        return (model(batch[0])[0] - batch[1]).square().mean(-1)

    def total(factor):
        def of(model, batch):
            y, routing = model(batch[0])
            return (y - batch[1]).square().mean() + factor * routing.aux_loss

        return of

    for factor, codes in ((0, {"balance-loss-missing"}), (1, set()), (2, {"balance-loss-doubled"})):
        report = audit(moe, batches, loss, total=total(factor), routes=0)
        assert report.aux_losses[0]["ratio"] == pytest.approx(factor, abs=1e-3)
        assert {one.code for one in report.findings if one.code.startswith("balance")} == codes


def test_no_balance_loss_is_missing_where_no_router_has_parameters():
    model = tiny_models.mixtral(router_aux_loss_coef=0.05)
    replace_routers(model, lambda p, n, k: HashGate(tiny_models.VOCABULARY, n))
    report = audit(model, [padded({"input_ids": IDS})], language_loss, routes=0, removal=False)
    assert report.aux_losses == []
    assert "balance-loss-missing" not in {finding.code for finding in report.findings}


def test_of_two_auxiliary_losses_the_one_that_is_not_added_is_named():
    torch.manual_seed(0)
    model = tiny_models.mixtral(router_aux_loss_coef=0.05, output_router_logits=True)
    replace_routers(model, wrap=lambda gate: RegularizedGate(gate, z_loss=0.05))

    def total(model, batch):  # the loss of the configuration only
        return model(**batch, labels=batch["input_ids"]).loss

    report = audit(model, [padded({"input_ids": IDS})], language_loss, total=total, routes=0, removal=False)
    ratios = {aux["source"]: aux["ratio"] for aux in report.aux_losses}
    assert ratios == pytest.approx({"router_aux_loss_coef": 1, "gates": 0}, abs=0.05)
    (finding,) = [one for one in report.findings if one.code.startswith("balance")]
    assert finding.code == "balance-loss-missing"
    assert "of the gates" in finding.message


def test_the_model_is_as_before(capsys):
    model = tiny_models.qwen3()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    audit(model, [{"input_ids": IDS}], lambda model, batch: model(**batch, labels=IDS).loss, routes=1)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())
    assert model.config.num_experts == tiny_models.N
    assert capsys.readouterr().out == ""


def test_a_list_of_experts_has_as_many_experts_as_modules():
    class ExpertList(nn.ModuleList):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states

    model = nn.ModuleDict({"gate": nn.Linear(8, 3), "experts": ExpertList(nn.Linear(8, 8) for _ in range(3))})
    (found,) = find_mixtures(model)
    assert found.num_experts == 3


def test_a_model_without_mixtures_is_refused():
    with pytest.raises(ValueError, match="Linear has no mixtures"):
        audit(nn.Linear(2, 2), [1], lambda model, batch: torch.zeros(1))


def test_a_model_whose_mixtures_have_one_expert_is_refused():
    moe = MoE(experts=DenseExperts(1, 8, 8), gate=TopKGate(8, 1, k=1), return_routing=False)
    with pytest.raises(ValueError, match="has one expert in each mixture, so nothing is routed"):
        audit(moe, [torch.randn(8, 8)], lambda model, batch: model(batch).square().mean(-1))
