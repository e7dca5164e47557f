"""GateWrapper: what a gate around a gate keeps of it, and computes in float32."""

import pytest
import torch
from torch.nn import functional as F

from comet_moe import Routing
from comet_moe.gates import (
    CometGate,
    ExpertChoiceGate,
    GateWrapper,
    HashGate,
    ReluGate,
    SoftmaxGate,
    TopKGate,
)


class WithProducts(GateWrapper):
    """Changes the input by one matrix product, and adds a loss by another."""

    def __init__(self, gate, p=8):
        super().__init__(gate)
        self.register_buffer("turn", torch.linalg.qr(torch.randn(p, p)).Q)

    def forward(self, x, keys=None, mask=None):
        self.seen = x.dtype, torch.is_autocast_enabled(x.device.type)
        routing = self.gate(x @ self.turn.to(x.dtype), keys=keys, mask=mask)
        loss = F.linear(routing.weights, torch.eye(self.num_experts, dtype=x.dtype)).square().mean()
        return Routing(weights=routing.weights, aux_loss=loss, mask=routing.mask)


@pytest.mark.parametrize("make", [lambda: SoftmaxGate(8, 6), lambda: CometGate(8, 6, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("around", [1, 2])
def test_a_wrapper_computes_in_float32_under_autocast(make, dtype, around):
    gate = make()
    for _ in range(around):
        gate = WithProducts(gate)
    x = torch.randn(16, 8).bfloat16().float()
    wanted = gate(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x.T).dtype == torch.bfloat16  # autocast does change products
        got = gate(x.to(dtype))
    assert gate.seen == (torch.float32, False)
    for one, other in ((got.weights, wanted.weights), (got.aux_loss, wanted.aux_loss)):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other)  # the tolerances of float32


def test_a_wrapper_computes_in_float64_if_the_gate_inside_does():
    gate = WithProducts(SoftmaxGate(8, 6).double())
    gate(torch.randn(4, 8, dtype=torch.float64))
    assert gate.seen[0] == torch.float64
    with pytest.raises(ValueError, match=r"computes in torch.float64, its input is torch.float32"):
        gate(torch.randn(4, 8))


def test_parameters_of_a_wrapper_do_not_decide_the_dtype_of_a_gate_without_any():
    class WithParameter(GateWrapper):
        def __init__(self, gate):
            super().__init__(gate)
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x, keys=None, mask=None):
            return self.gate(x, keys=keys, mask=mask)

    routing = WithParameter(HashGate(9, 6))(torch.randn(4, 8, dtype=torch.float64), keys=torch.arange(4))
    assert routing.weights.dtype == torch.float64


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.randn(2, 5), "8 features in its last dimension, got 5"),
        (torch.full((2, 8), float("nan")), "must be finite, got 16 NaN or infinite values of 16"),
        (torch.ones(2, 8, dtype=torch.int64), "floating-point dtype, got torch.int64"),
    ],
)
def test_a_wrapper_refuses_what_the_gate_inside_refuses(x, says):
    with pytest.raises(ValueError, match=says):
        WithProducts(TopKGate(8, 6, 2))(x)


def test_values_are_checked_once(monkeypatch):
    calls = []
    monkeypatch.setattr("comet_moe.checks.require_finite", lambda x: calls.append(x.shape))
    for make in (lambda: SoftmaxGate(8, 6), lambda: CometGate(8, 6, 2), lambda: TopKGate(8, 6)):
        calls.clear()
        WithProducts(WithProducts(make()))(torch.randn(4, 8))
        assert len(calls) == 1


def test_padding_has_weight_zero_and_hooks_of_both_are_called():
    gate, calls = WithProducts(TopKGate(8, 6, 2)), []
    for module in (gate, gate.gate):
        module.register_forward_hook(lambda module, args, output: calls.append(type(module)))
    mask = torch.tensor([True, False, True])
    weights = gate(torch.randn(3, 8), mask=mask).weights
    assert weights.count_nonzero(-1).tolist() == [2, 0, 2]
    assert calls == [TopKGate, WithProducts]


def test_a_wrapper_is_like_the_gate_inside():
    declared = ("num_experts", "in_features", "k", "sums_to_one", "max_weight_sum", "stochastic")
    declared += ("depends_on_batch", "soft_in_training")
    for inside in (TopKGate(8, 6, k=1, noise=True), ExpertChoiceGate(8, 6), ReluGate(8, 6)):
        gate = WithProducts(inside)
        assert {name: getattr(gate, name) for name in declared} == {
            name: getattr(inside, name) for name in declared
        }
    inside = TopKGate(8, 6, k=1, noise=True)
    gate = WithProducts(inside)
    assert gate.flops() == inside.flops()
    assert gate.idle_parameters() == {f"gate.{name}" for name in inside.idle_parameters()} != set()
    gate.keeps_contributions = True
    assert inside.keeps_contributions
