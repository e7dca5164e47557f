"""SoftmaxGate: dense weights, logits and its start."""

import torch
from gate_laws import assert_glorot_and_zero

from comet_moe.gates import SoftmaxGate


def test_softmax_is_dense():
    weights = SoftmaxGate(5, 6)(torch.randn(8, 5)).weights
    assert (weights > 0).all()


def test_weights_are_the_softmax_of_the_logits():
    gate, x = SoftmaxGate(5, 6), torch.randn(3, 7, 5)
    for training in (True, False):
        routing = gate.train(training)(x)
        torch.testing.assert_close(routing.logits, torch.nn.functional.linear(x, gate.weight, gate.bias))
        torch.testing.assert_close(routing.weights, routing.logits.softmax(-1))


def test_a_new_gate_has_a_glorot_uniform_weight_and_zero_bias():
    assert_glorot_and_zero(SoftmaxGate(300, 200))
