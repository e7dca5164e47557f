"""Dense models whose feed-forward layers become mixtures."""

import pytest
import torch
import transformers
from dense_models import FAMILIES, LAYERS, NEURONS, VOCABULARY, P, batch, build

import comet_moe
from comet_moe import RoutingMonitor
from comet_moe.exceptions import IdleGateWarning
from comet_moe.gates import CometGate, HashGate, TopKGate
from comet_moe.hf import FeedForwardLayout, importance, upcycle

GATES = ["softmax", "topk", "switch", "sigmoid", "dselect", "comet", "comet+", "topk+"]


AUTO = dict.fromkeys(FAMILIES, transformers.AutoModelForCausalLM)
AUTO["bert"] = transformers.AutoModelForSequenceClassification
AUTO["vit"] = transformers.AutoModelForImageClassification


def mixtures(model):
    return [module for module in model.modules() if type(module).__name__ == "UpcycledMixture"]


def logits(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_without_noise_are_the_dense_model(family):
    model = build(family)
    inputs = batch(family)
    dense = logits(model, **inputs)
    upcycle(model, experts=4, k=1, noise=0.0)
    assert [mixture.training for mixture in mixtures(model)] == [False] * LAYERS
    torch.testing.assert_close(logits(model, **inputs), dense, atol=1e-5, rtol=0)  # the limit asked for


@pytest.mark.parametrize("gate", [*GATES, "hash", "hash+"])
@pytest.mark.parametrize("k", [1, 2])
def test_copies_are_the_dense_model_with_every_gate_whose_rows_have_experts(gate, k):
    model = build("llama")
    dense = logits(model, **batch("llama"))
    upcycle(model, experts=3, k=k, gate=gate)
    torch.testing.assert_close(logits(model, **batch("llama")), dense, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_makes_the_experts_differ(family):
    model = build(family)
    dense = logits(model, **batch(family))
    upcycle(model, experts=2, k=1, noise=0.1)
    assert not torch.allclose(logits(model, **batch(family)), dense, atol=1e-3)
    for mixture in mixtures(model):
        first, second = (expert.parameters() for expert in mixture.experts.members)
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other) == (one.dim() == 1)
            if one.dim() > 1:
                # Both have noise of a tenth: their difference has 0.1 √2 standard deviations, of 384 draws.
                assert ((one - other).std() / one.std()).item() == pytest.approx(0.1 * 2**0.5, rel=0.25)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_train_together_with_the_gate(family):
    model = build(family)
    upcycle(model, experts=4, k=2, gate="comet", entropy=0.1, noise=0.01)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RoutingMonitor(model) as monitor:
        loss = model(**batch(family, labels=True)).loss + monitor.aux_loss
    loss.backward()
    optimizer.step()
    comet_moe.step(model)
    for mixture in mixtures(model):
        assert all(p.grad is not None for p in mixture.parameters())
        assert mixture.gate.split_weight.grad.any()


def test_top_1_trains_its_gate_although_its_weight_is_1():
    model = build("llama")
    upcycle(model, experts=4, k=1, gate="topk", noise=0.1)
    model(**batch("llama", labels=True)).loss.backward()
    assert all(mixture.gate.gate.weight.grad.any() for mixture in mixtures(model))


def test_top_1_with_the_constant_weight_1_is_a_warning_that_names_the_fix():
    model = build("llama")
    with pytest.warns(
        IdleGateWarning, match=r'2 mixtures, such as model.layers.0.mlp.*normalize="all"'
    ) as caught:
        upcycle(model, experts=4, k=1, gate=TopKGate)
    assert len(caught) == 1
    model(**batch("llama", labels=True)).loss.backward()
    assert not any(mixture.gate.weight.grad.any() for mixture in mixtures(model))


def test_memory_for_the_experts_is_counted_in_bytes(monkeypatch):
    layer = 3 * P * NEURONS * 4
    monkeypatch.setattr("comet_moe.memory.available_memory", lambda: 5 * LAYERS * layer)
    upcycle(build("llama"), experts=4, k=1)
    upcycle(build("llama"), experts=10, k=1, expert_size=NEURONS // 2, shared=NEURONS // 2)
    message = r"would need 0.1 MB of memory, and 0.0 MB are free: choose fewer experts"
    for split in ({}, {"expert_size": NEURONS, "shared": NEURONS}):
        with pytest.raises(ValueError, match=message):
            upcycle(build("llama"), experts=8, k=1, **split)


@pytest.mark.parametrize("family", FAMILIES)
def test_split_experts_with_all_neurons_are_the_dense_model(family):
    model = build(family)
    dense = logits(model, **batch(family))
    upcycle(model, experts=2, k=2, gate="topk", expert_size=NEURONS, shared=NEURONS)
    torch.testing.assert_close(logits(model, **batch(family)), dense, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_expert_and_copies_of_the_rest_are_the_dense_model(family, tmp_path):
    model = build(family)
    dense = logits(model, **batch(family))
    scores = importance(model, [batch(family, labels=True)])
    upcycle(model, experts=3, k=1, gate="switch", shared_expert=0.25, importance=scores)
    torch.testing.assert_close(logits(model, **batch(family)), dense, atol=1e-5, rtol=0)
    inner = ("inner." if family == "bert" else "") + comet_moe.hf.LAYOUTS[family].inner[0]
    for mixture in mixtures(model):
        experts = (mixture.shared, *mixture.experts.members)
        sizes = [
            len(comet_moe.hf.feed_forward.weight_of(one.get_submodule(inner)).detach()) for one in experts
        ]
        assert sizes == [NEURONS // 4] + [NEURONS - NEURONS // 4] * 3
    model.save_pretrained(tmp_path)
    again = AUTO[family].from_pretrained(tmp_path)
    assert torch.equal(logits(again, **batch(family)), logits(model, **batch(family)))


def test_a_shared_expert_has_the_most_important_neurons():
    model = build("llama")
    rows = model.model.layers[1].mlp.up_proj.weight.detach().clone()
    scores = torch.rand(LAYERS, NEURONS)
    upcycle(model, experts=2, k=1, shared_expert=0.5, importance=scores)
    order = scores[1].argsort(descending=True, stable=True)
    mixture = mixtures(model)[1]
    assert torch.equal(mixture.shared.up_proj.weight, rows[order[: NEURONS // 2]])
    for member in mixture.experts.members:
        assert torch.equal(member.up_proj.weight, rows[order[NEURONS // 2 :]])


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_share_the_most_important_neurons(family):
    model = build(family)
    scores = importance(model, [batch(family, labels=True)])
    assert scores.shape == (LAYERS, NEURONS)
    layout = comet_moe.hf.LAYOUTS[family]
    first = comet_moe.hf.feed_forward.find_feed_forward(model, layout)[0].inner[0]
    rows = comet_moe.hf.feed_forward.weight_of(first).clone()
    upcycle(model, experts=3, k=1, expert_size=8, shared=4, importance=scores)
    order = scores[0].argsort(descending=True, stable=True)
    name = ("inner." if family == "bert" else "") + layout.inner[0]
    for expert, member in enumerate(mixtures(model)[0].experts.members):
        own = comet_moe.hf.feed_forward.weight_of(member.get_submodule(name))
        assert own.shape == (8, P)
        assert torch.equal(own[:4], rows[order[:4]])
        assert torch.equal(own[4:], rows[order[4 + expert : 16 : 3]])


@pytest.mark.parametrize("family", FAMILIES)
def test_importance_is_the_first_order_change_of_the_loss_without_the_neuron(family):
    model = build(family).double()
    inputs = {
        name: value.double() if value.is_floating_point() else value
        for name, value in batch(family, True).items()
    }
    scores = importance(model, [{name: value[i : i + 1] for name, value in inputs.items()} for i in range(3)])
    layer = comet_moe.hf.feed_forward.find_feed_forward(model, comet_moe.hf.LAYOUTS[family])[1]
    weights = [*layer.inner, layer.outer]
    wanted = torch.zeros(NEURONS, dtype=torch.float64)
    for i in range(3):
        model.zero_grad()
        model(**{name: value[i : i + 1] for name, value in inputs.items()}).loss.backward()
        products = []
        for module in weights:
            product = module.weight * module.weight.grad
            neurons = product.shape.index(NEURONS)
            products.append(product.sum(1 - neurons))
        wanted += sum(products).abs().detach()
    torch.testing.assert_close(scores[1], wanted)


def test_only_the_layers_asked_for_are_converted():
    model = build("llama")
    upcycle(model, experts=2, k=1, layers=[1])
    assert not mixtures(model.model.layers[0])
    assert len(mixtures(model.model.layers[1])) == 1
    with pytest.raises(ValueError, match=r"layers must be in 0..1, got 2"):
        upcycle(model, experts=2, k=1, layers=[2])
    with pytest.raises(ValueError, match=r"^layer 1, model.layers.1.mlp, is a mixture already"):
        upcycle(model, experts=2, k=1, layers=[1])
    upcycle(model, experts=2, k=1)
    with pytest.raises(
        ValueError, match=r"^all feed-forward layers of LlamaForCausalLM are mixtures already"
    ):
        upcycle(model, experts=2, k=1)


def test_a_pattern_finds_the_layers_of_another_family():
    model = build("llama")
    model.config.model_type = "other"
    dense = logits(model, **batch("llama"))
    upcycle(model, experts=2, k=1, pattern=r"layers\.\d+\.mlp")
    torch.testing.assert_close(logits(model, **batch("llama")), dense, atol=1e-5, rtol=0)


def test_padding_passes_no_expert_and_hash_gates_get_token_ids():
    model = build("llama")
    upcycle(model, experts=4, k=1, gate="hash")
    ids = batch("llama")["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    seen = []

    def record(gate, args, kwargs, routing):
        seen.append((gate, routing.masked(kwargs["mask"])))

    for mixture in mixtures(model):
        mixture.gate.register_forward_hook(record, with_kwargs=True)
    model(input_ids=ids, attention_mask=mask)
    tables = [gate.assignment for gate, _ in seen]
    assert not torch.equal(*tables)  # one per layer
    for gate, routing in seen:
        assert routing.statistics()["samples"] == 13
        assert torch.equal(routing.weights.argmax(-1)[mask == 1], gate.assignment[ids][mask == 1])


def test_generation_with_a_cache_and_left_padding():
    model = build("llama")
    upcycle(model, experts=4, k=1, gate="hash")
    ids = batch("llama")["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    cached = model.generate(input_ids=ids, attention_mask=mask, **settings)
    again = model.generate(input_ids=ids, attention_mask=mask, use_cache=False, **settings)
    assert torch.equal(cached, again)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", [False, True])
def test_a_saved_model_comes_back(family, split, tmp_path):
    model = build(family)
    sizes = {"expert_size": 10, "shared": 4} if split else {}
    gate = "comet+" if split else "topk"
    upcycle(model, experts=2, k=1, gate=gate, noise=0.1, layers=[1], execution="sparse", **sizes)
    model.save_pretrained(tmp_path)
    again, info = AUTO[family].from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert repr(again) == repr(model)
    assert torch.equal(logits(again, **batch(family)), logits(model, **batch(family)))


def test_upcycling_in_two_parts_is_remembered_whole(tmp_path):
    model = build("llama")
    upcycle(model, experts=2, k=1, layers=[0])
    upcycle(model, experts=3, k=2, gate="topk", noise=0.1)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [mixture.gate.num_experts for mixture in mixtures(again)] == [2, 3]
    assert torch.equal(logits(again, **batch("llama")), logits(model, **batch("llama")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts": 0}, "experts must be an integer of at least 1, got 0"),
        ({"noise": -1.0}, "noise must be a finite number of at least 0"),
        ({"gate": "best"}, "best"),
        ({"gate": lambda p, n, k: TopKGate(p, n + 1, k)}, "chooses among 5 experts, there are 4"),
        ({"gate": CometGate, "entropy": 0.1}, "entropy: settings are for a gate by name"),
        ({"shared": 3}, "set expert_size"),
        ({"shared_expert": 0.01}, "must leave neurons on both sides, got 0.01 of 24: try 0.5"),
        ({"shared_expert": 0.5, "expert_size": 4}, "leave expert_size and shared out"),
        ({"expert_size": 30}, "need 120 neurons, and the feed-forward layers have 24"),
        ({"pattern": "nothing"}, "no module of LlamaForCausalLM has a name that ends as nothing"),
        ({"pattern": r"layers\.\d+\.mlp", "expert_size": 4}, "FeedForwardLayout with inner and outer"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_leaves_the_model_as_it_was(settings, message):
    model = build("llama")
    with pytest.raises(ValueError, match=message):
        upcycle(model, **{"experts": 4, "k": 1, **settings})
    assert not mixtures(model)
    assert not hasattr(model.config, "comet_moe")


def test_an_unknown_family_is_an_error_that_names_the_pattern():
    with pytest.raises(
        ValueError, match=r"^the feed-forward layers of OPTForCausalLM are not known, .*pattern"
    ):
        upcycle(build("opt"), experts=2, k=1)


def test_a_hash_gate_in_a_model_without_token_ids_is_an_error():
    model = build("vit")
    upcycle(model, experts=2, k=1, gate=lambda p, n, k: HashGate(VOCABULARY, n))
    with pytest.raises(ValueError, match="a hash gate routes by token id"):
        model(**batch("vit"))


def test_a_hash_gate_by_name_in_a_model_without_a_vocabulary_is_an_error():
    with pytest.raises(ValueError, match="a hash gate routes by token id: pass vocab_size"):
        upcycle(build("vit"), experts=2, k=1, gate="hash")


def test_rows_that_are_not_one_per_token_are_an_error():
    model = build("bert")
    model.bert.encoder.layer[0].chunk_size_feed_forward = 1
    upcycle(model, experts=2, k=1)
    with pytest.raises(ValueError, match=r"^the model got 15 tokens and its mixture 3 rows: .*to 0"):
        model(**batch("bert"))


def test_a_layout_of_ones_own_splits_another_family():
    model = build("llama")
    model.config.model_type = "other"
    layout = FeedForwardLayout(r"layers\.\d+\.mlp", ("gate_proj", "up_proj"), "down_proj")
    upcycle(model, experts=2, k=1, expert_size=10, pattern=layout)
    assert mixtures(model)[0].experts.members[1].up_proj.out_features == 10
