"""TopKGate: which experts it keeps, its noise and its logits."""

import pytest
import torch
from gate_laws import assert_glorot_and_zero, assert_slots_equal_dense
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.exceptions import IdleGateWarning
from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.models.build import build_model
from comet_moe.gates import TopKGate


@given(n=st.integers(1, 30), k=st.integers(1, 40))
def test_top_k_keeps_exactly_k_of_n(n, k):
    weights = TopKGate(5, n, k)(torch.randn(6, 5)).weights
    assert ((weights != 0).sum(-1) == min(n, k)).all()


def test_top_1_of_all_is_the_full_softmax_probability_and_trains():
    gate, x = TopKGate(5, 6, k=1, normalize="all"), torch.randn(8, 5)
    routing = gate(x)
    full = torch.nn.functional.linear(x, gate.weight, gate.bias).softmax(-1)
    torch.testing.assert_close(routing.weights.amax(-1), full.amax(-1))
    routing.weights.sum().backward()
    assert gate.weight.grad.abs().max() > 0


def test_top_1_of_selected_has_no_gradient_and_says_so():
    with pytest.warns(IdleGateWarning, match='k=1 and normalize="selected" .* use normalize="all", or k > 1'):
        gate = TopKGate(5, 6, k=1)
    gate(torch.randn(8, 5)).weights.square().sum().backward()
    assert gate.weight.grad.abs().max() == 0
    assert gate.idle_parameters() == {"weight", "bias"}


@pytest.mark.parametrize("settings", [{"k": 1, "normalize": "all"}, {"k": 2}])
@pytest.mark.filterwarnings("error")
def test_a_gate_that_trains_does_not_warn(settings):
    TopKGate(5, 6, **settings)


@pytest.mark.filterwarnings("error")
def test_one_expert_is_no_choice_to_warn_of():
    TopKGate(5, 1)


def test_noise_acts_in_training_only_and_is_trained():
    gate, x = TopKGate(5, 6, k=2, noise=True), torch.randn(200, 5)
    assert not torch.equal(gate(x).weights, gate(x).weights)
    gate(x).weights[:, 0].sum().backward()
    assert gate.noise_weight.grad.abs().max() > 0
    gate.eval()
    assert torch.equal(gate(x).weights, gate(x).weights)


def test_noise_has_the_standard_deviation_of_its_softplus():
    gate = TopKGate(1, 2, k=2, noise=True)
    with torch.no_grad():
        gate.weight.zero_()
    logits = gate(torch.ones(40_000, 1)).weights.log()
    spread = (logits[:, 0] - logits[:, 1]).detach().std()  # the difference of two independent noises
    assert abs(spread.item() / (2**0.5 * 0.6931) - 1) < 0.02  # its standard error is 0.35 %


def test_logits_are_those_that_were_compared():
    gate, x = TopKGate(5, 6, k=2, noise=True), torch.randn(3, 7, 5)
    routing = gate(x)
    assert routing.logits.shape == (3, 7, 6)
    assert torch.equal(routing.weights != 0, routing.logits >= routing.logits.topk(2).values[..., 1:])
    plain = torch.nn.functional.linear(x, gate.weight, gate.bias)
    assert (routing.logits - plain).abs().max() > 1e-3  # the noise
    gate.eval()
    torch.testing.assert_close(gate(x).logits, plain)
    with torch.no_grad():
        torch.testing.assert_close(gate(x).logits, plain.detach())


def test_a_new_gate_has_a_glorot_uniform_weight_and_zero_bias():
    assert_glorot_and_zero(TopKGate(300, 200, k=2, noise=True))
    assert TopKGate(3, 4, noise=True).noise_weight.count_nonzero() == 0


def test_slots_hold_the_weights_of_training():
    for n, k in ((1, 1), (2, 1), (5, 4), (16, 2)):
        for normalize in ("selected", "all"):
            gate, x = TopKGate(6, n, k, normalize=normalize).eval(), torch.randn(50, 6)
            assert_slots_equal_dense(gate, x)


@pytest.mark.parametrize("gate", ["topk", "topk+"])
def test_a_recipe_sets_the_scale_of_its_gates(gate):
    meta = {"name": "movielens", "num_users": 30, "num_items": 20, "rows": {"train": 100}}
    model = build_model(load_train_config("movielens", [f"gate={gate}", "gates.topk.scale=4"]), meta).eval()
    _, routings = model({"user": torch.arange(5), "item": torch.arange(5)})
    for routing in routings:
        torch.testing.assert_close(routing.weights.sum(-1), torch.full((5,), 4.0))
