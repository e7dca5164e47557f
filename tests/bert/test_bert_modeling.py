"""Sparse BERTs: equal to the dense one where they must be, blind to padding, usable through transformers."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from comet_moe import Permutation
from comet_moe.bert import CometBertConfig, CometBertForSequenceClassification, CometBertModel, convert_bert
from comet_moe.bert.gating import SentenceGate
from comet_moe.experiments.config import load_config
from comet_moe.files import ALIGNMENT
from comet_moe.gates import CometGate, HashGate, TopKGate, WarmupGate
from tiny_bert import LAYERS, NEURONS, batch, inputs, save_checkpoint, tiny_bert

# Every gate by token, those that can by sentence, and a search around gates with features and with keys.
ROUTED = [
    *((gate, "token") for gate in ("softmax", "hash", "topk", "dselect", "comet", "hash+", "comet+")),
    *((gate, "sentence") for gate in ("softmax", "topk", "comet", "comet+")),
]


def sparse(dense, gate="comet", route_by="token", **changed):
    settings = {"experts": 4, "expert_size": 18, "shared": 8, "k": 1, "search_steps": 5 if "+" in gate else 0}
    return convert_bert(dense, gate=gate, route_by=route_by, **{**settings, **changed})


def far_from_uniform(model):
    """Gates whose choices differ from token to token, as training makes them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".gates." in name and "search" not in name:
                parameter.normal_()
    return model


@pytest.mark.parametrize(
    ("gate", "route_by", "kind"),
    [
        *((*routed, "classifier") for routed in ROUTED),
        ("comet", "token", "answers"),
        ("comet", "token", "base"),
    ],
)
def test_one_expert_with_all_neurons_is_the_dense_model(gate, route_by, kind):
    dense = tiny_bert(kind)
    scores = torch.rand(LAYERS, NEURONS)
    student = sparse(dense, gate, route_by, experts=1, expert_size=NEURONS, shared=5, importance=scores)
    arguments = inputs(batch(kind=kind))
    real = arguments["attention_mask"].bool()
    with torch.no_grad():
        ours, theirs = student(**arguments), dense(**arguments)
    for name in theirs:
        a, b = (out[name][real] if out[name].shape[:2] == real.shape else out[name] for out in (ours, theirs))
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


# Top-1 by the full softmax is not here: its weight is a probability below 1.
@pytest.mark.parametrize(
    ("gate", "k"), [("softmax", 1), ("hash", 1), ("topk", 2), ("dselect", 1), ("comet", 1), ("comet+", 2)]
)
def test_equal_experts_are_the_dense_model_of_their_neurons(gate, k):
    dense = tiny_bert()
    student = far_from_uniform(sparse(dense, gate, k=k, experts=4, expert_size=NEURONS, shared=NEURONS))
    arguments = inputs(batch())
    with torch.no_grad():
        torch.testing.assert_close(student(**arguments).logits, dense(**arguments).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("gate", "route_by"), ROUTED)
def test_a_row_has_the_same_routing_and_outputs_alone_and_in_a_batch(gate, route_by):
    # In double precision: products of other shapes round differently, and these gates, whose logits change by
    # about 6 per unit of their input, pass on a hundred times the rounding error of the layers before them.
    student = far_from_uniform(sparse(tiny_bert(), gate, route_by, k=2)).double()
    arguments = inputs(batch())
    with torch.no_grad():
        together_routings = []
        together = student(**arguments, routings=together_routings).logits
        for row in range(4):
            length = int(arguments["attention_mask"][row].sum())
            routings = []
            alone = student(
                input_ids=arguments["input_ids"][row : row + 1, :length], routings=routings
            ).logits
            torch.testing.assert_close(alone[0], together[row], atol=1e-9, rtol=0)
            for one, many in zip(routings, together_routings, strict=True):
                torch.testing.assert_close(one.weights[0], many.weights[row, :length], atol=1e-9, rtol=0)


@pytest.mark.parametrize(("gate", "route_by"), ROUTED)
@pytest.mark.parametrize("training", [True, False])
def test_no_expert_gets_padding_and_statistics_do_not_count_it(gate, route_by, training):
    student = sparse(tiny_bert(), gate, route_by, entropy=0.3, load_balance=0.2).train(training)
    arguments = inputs(batch())
    real = arguments["attention_mask"].bool()
    routings = []
    student(**arguments, routings=routings)
    assert len(routings) == LAYERS
    for routing in routings:
        assert (routing.weights[~real] == 0).all()
        assert (routing.weights[real].sum(-1) > 0).all()
        assert routing.statistics()["samples"] == int(real.sum())


@pytest.mark.parametrize("gate", ["comet", "topk", "dselect", "softmax"])
@pytest.mark.parametrize("route_by", ["token", "sentence"])
def test_the_auxiliary_loss_does_not_depend_on_the_tokens_of_the_padding(gate, route_by):
    student = sparse(tiny_bert(), gate, route_by, entropy=0.3, load_balance=0.2)
    for module in student.modules():  # training, but for dropout
        module.training = not isinstance(module, torch.nn.Dropout)
    student.config.attention_probs_dropout_prob = 0.0
    for layer in student.bert.encoder.layer:
        layer.attention.self.dropout.p = layer.moe.experts.dropout = 0.0
    arguments = batch()
    padding = ~arguments["attention_mask"].bool()
    other = arguments | {"input_ids": arguments["input_ids"].masked_fill(padding, 7)}
    with torch.no_grad():
        first, second = student(**arguments), student(**other)
    torch.testing.assert_close(first.aux_loss, second.aux_loss, atol=1e-6, rtol=0)
    torch.testing.assert_close(first.logits, second.logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("gate", ["hash", "topk", "comet"])
@pytest.mark.parametrize("training", [True, False])
def test_only_the_chosen_experts_run(gate, training):
    student = far_from_uniform(sparse(tiny_bert(), gate, gamma=1e-3)).train(training)
    arguments = inputs(batch())
    routings = []
    student(**arguments, routings=routings)
    for routing in routings:
        assert routing.execution == "sparse"
        assert routing.expert_rows == int(arguments["attention_mask"].sum())  # one expert per token


@pytest.mark.parametrize(("gate", "route_by"), ROUTED)
def test_every_parameter_gets_a_gradient_and_dense_execution_the_same(gate, route_by):
    student = sparse(tiny_bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), gate, route_by)
    student.train()
    gradients = {}
    for execution in ("sparse", "dense"):
        for layer in student.bert.encoder.layer:
            layer.moe.execution = execution
        student.zero_grad()
        torch.manual_seed(0)
        arguments = batch()
        student(**arguments).loss.backward()
        gradients[execution] = {name: parameter.grad for name, parameter in student.named_parameters()}
    assert all(gradient is not None for gradient in gradients["sparse"].values())
    for name, gradient in gradients["sparse"].items():
        torch.testing.assert_close(gradient, gradients["dense"][name], atol=1e-5, rtol=1e-4)


def test_the_loss_includes_the_auxiliary_loss_in_training_only():
    student = sparse(tiny_bert(), "comet+", entropy=0.3, load_balance=0.2)
    arguments = batch()
    found = student.train()(**arguments)
    assert found.aux_loss.item() > 0
    plain = torch.nn.functional.cross_entropy(found.logits, arguments["labels"])
    torch.testing.assert_close(found.loss, plain + found.aux_loss)
    found = student.eval()(**arguments)
    assert found.aux_loss is None
    torch.testing.assert_close(
        found.loss, torch.nn.functional.cross_entropy(found.logits, arguments["labels"])
    )


@pytest.mark.parametrize("kind", ["base", "classifier"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_list_of_routings_gets_those_of_each_call_and_the_loss_is_of_one_call(kind, checkpointing):
    student = sparse(tiny_bert(kind), "topk", load_balance=0.2).train()
    if checkpointing:
        student.gradient_checkpointing_enable({"use_reentrant": False})
    arguments = inputs(batch())
    routings = []
    for call in (1, 2):
        found = student(**arguments, routings=routings)
        found.aux_loss.backward()
        assert len(routings) == call * LAYERS
        last = torch.stack([routing.aux_loss for routing in routings[-LAYERS:]]).sum()
        torch.testing.assert_close(found.aux_loss, last)


def test_top_1_weighs_by_the_probability_among_all_experts():
    student = far_from_uniform(sparse(tiny_bert(), "topk"))
    gate = student.bert.encoder.layer[0].moe.gate
    x = torch.randn(2, 5, gate.in_features)
    probabilities = torch.nn.functional.linear(x, gate.weight, gate.bias).softmax(-1)
    torch.testing.assert_close(gate(x).weights.sum(-1), probabilities.amax(-1))


@pytest.mark.parametrize("padded", [True, False])
def test_a_sentence_gate_gives_each_token_the_logits_and_contributions_of_its_sentence(padded):
    x, mask = torch.randn(3, 5, 8), torch.ones(3, 5, dtype=torch.bool) if padded else None
    top_k, comet = TopKGate(8, 4, 2), CometGate(8, 4, 2)
    comet.keeps_contributions = True
    routing = SentenceGate(top_k)(x, mask=mask)
    assert routing.logits.shape == (3, 5, 4)
    assert torch.equal(routing.logits[:, 0], routing.logits[:, 4])
    # The mean of the tokens is a sum over all of them, divided, with a mask; it may round differently.
    torch.testing.assert_close(routing.logits[:, 0], top_k(x.mean(1)).logits)
    contributions = SentenceGate(comet)(x, mask=mask).contributions
    assert contributions.shape == (3, 5, 2, 4)
    torch.testing.assert_close(contributions[:, 3], comet(x.mean(1)).contributions)


@pytest.mark.parametrize(("k", "normalize"), [(1, "all"), (2, "selected")])
def test_the_softmax_of_the_top_k_gate_of_a_recipe_follows_k(k, normalize):
    settings = load_config("bert-rte", ["gate=topk", f"gate.k={k}"]).gate.model_dump(
        include={"k", "normalize"}
    )
    gate = sparse(tiny_bert(), "topk", **settings).bert.encoder.layer[0].moe.gate
    assert (gate.k, gate.normalize) == (k, normalize)


def test_the_load_balancing_loss_is_1_for_even_load_and_the_number_of_experts_for_one_expert():
    student = sparse(tiny_bert(), "topk", load_balance=1.0)
    balanced = student.bert.encoder.layer[0].moe.gate.train()
    x = torch.randn(64, 5, balanced.in_features)
    with torch.no_grad():
        for parameter in balanced.parameters():
            parameter.zero_()
        # Even probabilities: Σ P_e f_e = 1/E whatever the choices.
        torch.testing.assert_close(balanced(x).aux_loss, torch.tensor(1.0))
        balanced.gate.bias[2] = 100.0  # all to one expert
        torch.testing.assert_close(balanced(x).aux_loss, torch.tensor(4.0))


@pytest.mark.parametrize(
    ("kind", "auto", "gate"),
    [
        ("classifier", AutoModelForSequenceClassification, "comet+"),
        ("answers", AutoModelForQuestionAnswering, "hash+"),
        ("base", AutoModel, "topk"),
    ],
)
def test_a_saved_and_loaded_model_gives_the_same_bits(tmp_path, kind, auto, gate):
    student = sparse(tiny_bert(kind), gate, search_steps=3 if "+" in gate else 0)
    for search in (module for module in student.modules() if isinstance(module, Permutation)):
        search.step()
    student.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is type(student)
    assert loaded.config.to_dict() | {"_name_or_path": ""} == student.config.to_dict() | {"_name_or_path": ""}
    before, after = student.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # Rounding depends on the alignment of weights, so both models have theirs in aligned memory.
    assert all(value.data_ptr() % ALIGNMENT == 0 for value in (*before.values(), *after.values()))
    arguments = inputs(batch(kind=kind))
    with torch.no_grad():
        for ours, theirs in zip(student(**arguments).to_tuple(), loaded(**arguments).to_tuple(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("saved", "overridden", "zeros"),
    [
        *(({"balance": balance}, {}, ["split_sums"]) for balance in ("median", "normalize")),
        ({}, {"max_paths": 2}, ["cut_trees", "walked_trees"]),
        ({}, {"gamma": (1.0, 0.1), "gamma_steps": 9}, ["progress"]),
        ({"warmup_steps": 7}, {"max_paths": 2}, ["cut_trees"]),
        ({"gate": "dselect"}, {}, []),
        ({"gate": "sigmoid", "bias_update": 0.1}, {}, ["choice_counts"]),
        ({"gate": "topk", "balance": "quantile"}, {}, ["margins"]),
        ({"gate": "relu"}, {}, ["active_and_rows"]),
        ({"gate": "product-keys"}, {}, []),
    ],
)
def test_a_loaded_model_keeps_its_gates_and_starts_new_buffers_at_zero(tmp_path, saved, overridden, zeros):
    student = sparse(tiny_bert("base"), **saved)
    with torch.no_grad():
        for value in student.state_dict().values():
            value.add_(1)
    student.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, **overridden)
    after = loaded.state_dict()
    for name, value in student.state_dict().items():
        assert torch.equal(value, after[name]), name
    for ending in zeros:
        buffers = [value for name, value in loaded.named_buffers() if name.endswith(ending)]
        assert len(buffers) == LAYERS
        assert all((value == 0).all() for value in buffers)


def test_a_warm_up_that_a_checkpoint_does_not_have_begins_with_its_first_step(tmp_path):
    sparse(tiny_bert("base")).save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, warmup_steps=7)
    gates = [module for module in loaded.modules() if isinstance(module, WarmupGate)]
    assert [int(gate.progress) for gate in gates] == [0] * LAYERS


def test_a_search_continues_after_loading(tmp_path):
    student = sparse(tiny_bert(), "comet+", search_steps=3)
    for _ in range(2):
        for module in student.modules():
            if isinstance(module, Permutation):
                module.step()
    student.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    searches = [module for module in loaded.modules() if isinstance(module, Permutation)]
    assert len(searches) == LAYERS
    assert all(search.searching and int(search.progress) == 2 for search in searches)
    for search in searches:
        search.step()
    assert not any(search.searching for search in searches)


def test_a_dense_checkpoint_loaded_as_sparse_has_initialised_gates_and_experts(tmp_path):
    tiny_bert(initializer_range=0.02).save_pretrained(tmp_path)
    settings = {"num_experts": 3, "expert_size": 8, "search_steps": 7, "gamma": 0.5, "hash_seed": 5}
    for gate in ("comet", "hash"):
        loaded = CometBertForSequenceClassification.from_pretrained(tmp_path, gate=gate, **settings)
        tensors = loaded.state_dict()
        assert all(torch.isfinite(value).all() for value in tensors.values())
        for name, value in tensors.items():
            if name.endswith("progress"):
                assert int(value) == 0
            elif name.endswith("fixed"):
                assert value.tolist() == [-1, -1, -1]  # no permutation is fixed yet
            elif "split" in name:
                assert 0 < value.abs().max() <= 0.5 / 100
            elif "leaf" in name or name.endswith("logits"):
                assert 0 < value.abs().max() <= 0.05
            elif name.endswith("inner.weight"):
                assert 0.01 < value.std() < 0.03
        tables = [module.assignment for module in loaded.modules() if isinstance(module, HashGate)]
        for layer, table in enumerate(tables):
            assert torch.equal(table, HashGate(len(table), 3, seed=5 + layer).assignment)


def test_hash_tables_differ_by_layer_or_balance_the_load():
    dense = tiny_bert()
    tables = [m.assignment for m in sparse(dense, "hash").modules() if isinstance(m, HashGate)]
    assert not torch.equal(tables[0], tables[1])
    counts = torch.arange(dense.config.vocab_size)
    student = sparse(dense, "hash", frequencies=counts)
    for module in student.modules():
        if isinstance(module, HashGate):
            load = torch.zeros(4).index_add(0, module.assignment, counts.float())
            assert load.max() - load.min() <= counts.max()


def test_a_pipeline_classifies_with_a_saved_student(tmp_path):
    checkpoint = save_checkpoint(tmp_path / "dense", "classifier")
    dense = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    student = sparse(dense.eval(), "comet")
    student.save_pretrained(tmp_path / "sparse")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "sparse")
    classify = pipeline("text-classification", model=str(tmp_path / "sparse"))
    texts = ["the cat sat on the mat .", "a bird"]
    for text, found in zip(texts, classify(texts, batch_size=2), strict=True):
        with torch.no_grad():
            logits = student(**classify.tokenizer(text, return_tensors="pt")).logits[0]
        assert found["label"] == f"LABEL_{int(logits.argmax())}"
        assert found["score"] == pytest.approx(float(logits.softmax(-1).max()), abs=1e-5)


def test_gradient_checkpointing_gives_the_same_gradients():
    student = sparse(tiny_bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), "comet+").train()
    arguments = batch()
    student(**arguments).loss.backward()
    before = {name: parameter.grad.clone() for name, parameter in student.named_parameters()}
    student.zero_grad()
    student.gradient_checkpointing_enable({"use_reentrant": False})
    student(**arguments).loss.backward()
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name], atol=1e-6, rtol=1e-5)


def test_auto_classes_know_the_configuration(tmp_path):
    CometBertConfig(gate="topk", num_experts=3).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (type(config), config.gate, config.num_experts) == (CometBertConfig, "topk", 3)


def test_a_tuple_is_returned_on_request():
    student = sparse(tiny_bert(), "comet")
    arguments = inputs(batch())
    with torch.no_grad():
        (logits,) = student(**arguments, return_dict=False)
        assert torch.equal(logits, student(**arguments).logits)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"gate": "resnet"}, "gate must be one of dense, .*, got 'resnet'"),
        ({"route_by": "word"}, "route_by must be"),
        ({"gate": "hash", "route_by": "sentence"}, "a hash gate routes by token id"),
        ({"is_decoder": True}, "only encoders"),
    ],
)
def test_a_wrong_configuration_is_named(settings, says):
    with pytest.raises(ValueError, match=says):
        CometBertConfig(**settings)


def test_wrong_input_is_named():
    student = sparse(tiny_bert("base"), "hash")
    assert isinstance(student, CometBertModel)
    with pytest.raises(ValueError, match="a hash gate routes by token id: give input_ids"):
        student(inputs_embeds=torch.randn(1, 3, 32))
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(B, T\)"):
        student(torch.ones(1, 3, dtype=torch.int64), attention_mask=torch.ones(1, 3, 3))
