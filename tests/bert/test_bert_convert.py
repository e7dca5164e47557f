"""Importance and conversion: which neurons an expert gets, and that they are the dense model's."""

import pytest
import torch
from transformers import DistilBertConfig, DistilBertModel

from comet_moe.bert import CometBertForQuestionAnswering, convert_bert, importance
from comet_moe.hf.feed_forward import assign_neurons
from tiny_bert import LAYERS, NEURONS, batch, inputs, tiny_bert


def by_definition(model, arguments):
    """I_j = Σ_samples |<w1_j, ∂ℓ/∂w1_j> + <w2_j, ∂ℓ/∂w2_j>|, sample by sample."""
    scores = torch.zeros(LAYERS, NEURONS, dtype=torch.float64)
    for row in range(len(arguments["input_ids"])):
        model.zero_grad()
        model(**{name: value[row : row + 1] for name, value in arguments.items()}).loss.backward()
        for index, layer in enumerate(model.bert.encoder.layer):
            first, second = layer.intermediate.dense.weight, layer.output.dense.weight
            inner = (first * first.grad).sum(1) + (second * second.grad).sum(0)
            scores[index] += inner.abs().detach()
    return scores


@pytest.mark.parametrize("kind", ["classifier", "answers"])
@pytest.mark.parametrize("frozen", [False, True])
def test_one_backward_pass_gives_the_definition(kind, frozen):
    model = tiny_bert(kind).double()
    batches = [batch(kind=kind), batch(3, 6, kind=kind), batch(2, 8, padded=False, kind=kind)]
    expected = sum(by_definition(model, arguments) for arguments in batches)
    model.requires_grad_(not frozen)
    torch.testing.assert_close(importance(model, batches), expected, atol=1e-6, rtol=0)


def test_importance_does_not_change_the_model():
    model = tiny_bert().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.zero_grad()
    importance(model, [batch()])
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_errors_of_importance_say_what_is_missing():
    model = tiny_bert()
    with pytest.raises(ValueError, match="batches must have at least 1 batch"):
        importance(model, [])
    with pytest.raises(ValueError, match="a batch must have labels"):
        importance(model, [inputs(batch())])
    with pytest.raises(ValueError, match="the feed-forward layers of Linear are not known"):
        importance(torch.nn.Linear(2, 2), [batch()])


def test_neurons_are_assigned_to_the_experts_in_turn_by_importance():
    order = torch.tensor([9, 1, 5, 0, 8, 2, 3, 4, 6, 7])
    assigned = assign_neurons(order, experts=3, expert_size=4, shared=2)
    assert assigned.tolist() == [[9, 1, 5, 2], [9, 1, 0, 3], [9, 1, 8, 4]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            (4, 20, 4),
            "4 experts of 20 neurons, 4 of them shared, need 68 neurons, and the feed-forward layers have "
            "48: lower expert_size or experts, or raise shared",
        ),
        ((4, 10, 11), "shared must be at most expert_size, 10, got 11"),
        ((0, 10, 1), "experts must be at least 1, got 0"),
        ((2, 10, -1), "shared must be at least 0, got -1"),
    ],
)
def test_too_few_neurons_are_an_error_that_names_the_limit(arguments, says):
    with pytest.raises(ValueError, match=says):
        assign_neurons(torch.arange(NEURONS), *arguments)
    experts, size, shared = arguments
    with pytest.raises(ValueError, match=says):
        convert_bert(tiny_bert(), experts=experts, expert_size=size, shared=shared)


def test_an_expert_is_the_dense_layer_without_the_neurons_it_did_not_get():
    dense = tiny_bert()
    scores = torch.rand(LAYERS, NEURONS)
    student = convert_bert(dense, gate="comet", experts=4, expert_size=18, shared=8, importance=scores)
    x = torch.randn(7, dense.config.hidden_size)
    for layer, (old, new) in enumerate(
        zip(dense.bert.encoder.layer, student.bert.encoder.layer, strict=True)
    ):
        assigned = assign_neurons(scores[layer].argsort(descending=True), 4, 18, 8)
        for expert, neurons in enumerate(assigned):
            kept = torch.zeros(NEURONS).index_fill(0, neurons, 1.0)
            with torch.no_grad():
                expected = old.output(old.intermediate(x) * kept, x)
                torch.testing.assert_close(new.moe.experts.one(x, expert), expected, atol=1e-5, rtol=0)


def test_the_dense_model_is_not_changed_and_its_mode_is_kept():
    dense = tiny_bert("answers").train()
    before = {name: value.clone() for name, value in dense.state_dict().items()}
    student = convert_bert(dense, experts=2, expert_size=10, shared=4)
    assert isinstance(student, CometBertForQuestionAnswering)
    assert student.training
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
    assert all(torch.equal(before[name], value) for name, value in dense.state_dict().items())


def test_half_precision_and_settings_are_kept():
    dense = tiny_bert().bfloat16()
    student = convert_bert(
        dense, "comet", 2, 10, 4, gamma=0.1, entropy=0.2, search_steps=9, zeta=1e-3, tau=(0.1, 1e-3)
    )
    assert student.dtype == torch.bfloat16
    config = student.config
    assert (config.gamma, config.entropy, config.search_steps, config.zeta) == (0.1, 0.2, 9, 1e-3)
    assert tuple(config.tau) == (0.1, 1e-3)
    with torch.no_grad():
        assert student(**inputs(batch())).logits.dtype == torch.bfloat16


def test_top_1_with_a_scale_of_the_number_of_experts_gives_an_expert_at_least_its_whole_output():
    weights = {}
    for scale in (1, 4):
        torch.manual_seed(0)
        student = convert_bert(tiny_bert(), "topk", 4, 12, 4, k=1, scale=scale)
        routings = []
        with torch.no_grad():
            student(**inputs(batch(padded=False)), routings=routings)
        weights[scale] = routings[0].top(1)[0]  # the first layer, whose input is the same
    torch.testing.assert_close(weights[4], 4 * weights[1])
    assert weights[1].max() < 1  # the largest of four probabilities, at least a quarter
    assert weights[4].min() >= 1


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        (
            lambda: DistilBertModel(
                DistilBertConfig(dim=8, hidden_dim=8, n_heads=2, n_layers=1, vocab_size=9)
            ),
            {},
            "only a dense BERT can be converted .*, got DistilBertModel",
        ),
        (
            lambda: convert_bert(tiny_bert(), experts=2, expert_size=10, shared=4),
            {},
            "only a dense BERT can be converted .*, got CometBertForSequenceClassification",
        ),
        (tiny_bert, {"importance": torch.rand(LAYERS, 3)}, "importance must have 3 layers of 48 neurons"),
        (tiny_bert, {"gmma": 1}, "there is no setting gmma"),
        (tiny_bert, {"frequencies": torch.ones(3)}, "frequencies are for a hash gate, and the gate is comet"),
        (
            tiny_bert,
            {"gate": "hash", "frequencies": torch.ones(3)},
            r"frequencies must have one number per token, .* got \(3,\)",
        ),
    ],
)
def test_an_error_names_what_cannot_be_converted(model, settings, says):
    with pytest.raises(ValueError, match=says):
        convert_bert(model(), **{"experts": 2, "expert_size": 10, "shared": 4, **settings})
