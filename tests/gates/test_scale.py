"""``scale`` multiplies the weights of every gate, and nothing else."""

import pytest
import torch
from all_gates import N, P, keys_of

from comet_moe.gates import DSelectKGate, ExpertChoiceGate, HashGate, ReluGate, SoftmaxGate, TopKGate

GATES = {
    "softmax": lambda scale: SoftmaxGate(P, N, scale=scale),
    "topk": lambda scale: TopKGate(P, N, k=2, scale=scale),
    "sigmoid": lambda scale: TopKGate(P, N, k=2, score="sigmoid", scale=scale),
    "dselect": lambda scale: DSelectKGate(P, 8, k=2, entropy=0.1, scale=scale),
    "dselect, n no power of 2": lambda scale: DSelectKGate(P, N, k=2, reachability=0.1, scale=scale),
    "relu": lambda scale: ReluGate(P, N, target=2, scale=scale),
    "expert choice": lambda scale: ExpertChoiceGate(P, N, scale=scale),
    "hash": lambda scale: HashGate(9, N, k=2, scale=scale),
    "hash, learned": lambda scale: HashGate(9, N, k=2, weights="learned", in_features=P, scale=scale),
}


def pair(name):
    torch.manual_seed(0)
    plain, scaled = GATES[name](1.0), GATES[name](2.5)
    scaled.load_state_dict(plain.state_dict())
    return plain, scaled


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", GATES)
def test_only_the_weights_change(name, training):
    plain, scaled = pair(name)
    x = torch.randn(20, P)  # no weight near 1e-5, from which an expert counts as selected
    with torch.set_grad_enabled(training):
        one, other = (gate.train(training)(x, keys=keys_of(x)) for gate in (plain, scaled))
    torch.testing.assert_close(other.weights, 2.5 * one.weights)
    assert torch.equal(other.aux_loss, one.aux_loss)
    statistics = other.statistics()
    for key, value in one.statistics().items():
        if isinstance(value, float):
            assert statistics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("name", ["dselect", "dselect, n no power of 2"])
def test_hard_selectors_are_scaled_too(name):
    plain, scaled = pair(name)
    with torch.no_grad():
        for gate in (plain, scaled):
            gate.selector_weight.mul_(1e6)
            gate.selector_bias.mul_(1e6)
        x = torch.randn(20, P)
        torch.testing.assert_close(scaled.eval()(x).weights, 2.5 * plain.eval()(x).weights)


@pytest.mark.parametrize("name", GATES)
def test_a_scale_that_is_not_positive_is_refused(name):
    with pytest.raises(ValueError, match="scale must be a finite number above 0, got 0"):
        GATES[name](0.0)
