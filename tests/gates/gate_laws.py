"""What tests of several gates check."""

from unittest import mock

import pytest
import torch

from comet_moe.testing import LAWS, check_gate

COMPILED = pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
"""For tests that call `check_laws`: what torch compiles takes nearly all of their time."""


def check_laws(factory, compiled):
    """`check_gate` with the law about compiled gates alone, or with all others."""
    laws = {name: law for name, law in LAWS.items() if (name == "compiles") == compiled}
    with mock.patch.dict(LAWS, laws, clear=True):
        check_gate(factory)


def assert_uniform(values, limit):
    """``values`` look drawn from Uniform(-limit, limit): bounds, and moments by their standard errors."""
    values = values.detach().double().flatten()
    count = len(values)
    assert count >= 1000, "too few values to tell a distribution"
    assert values.abs().max() <= limit
    assert values.abs().max() > limit * (1 - 20 / count)  # P(no value beyond this) = exp(-20)
    assert abs(values.mean().item()) < 5 * limit / (3 * count) ** 0.5
    # The square of a uniform variable has mean limit²/3 and variance 4 limit⁴/45.
    assert abs(values.square().mean().item() - limit**2 / 3) < 5 * limit**2 * (4 / 45 / count) ** 0.5


def assert_glorot_and_zero(gate):
    """``gate.weight`` (n, p) is Uniform(±sqrt(6 / (n + p))) and ``gate.bias`` is zero."""
    n, p = gate.weight.shape
    assert_uniform(gate.weight, (6 / (n + p)) ** 0.5)
    assert gate.bias.count_nonzero() == 0


def assert_slots_equal_dense(gate, x):
    """Without gradients the gate routes into slots, with the weights that it has with gradients."""
    dense = gate(x).weights.detach()
    with torch.no_grad():
        direct = gate(x)
    assert direct.in_pairs
    torch.testing.assert_close(direct.weights, dense)
    assert torch.equal(direct.weights != 0, dense != 0)
