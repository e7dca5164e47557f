"""Training of DSelect-k over the codes that rows reach equals training over all codes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import comet_moe.gates.dselect_k as dselect_k
from comet_moe import MoE
from comet_moe.experts import NeuronExperts
from comet_moe.gates import DSelectKGate, RegularizedGate

P = 5


@pytest.fixture(autouse=True)
def _codes_at_any_size(monkeypatch):
    monkeypatch.setattr(dselect_k, "CODES_EXPERTS", 1)
    monkeypatch.setattr(dselect_k, "CODES_SHARE", 1.0)


def selectors(n, k, gamma, seed=0, **settings):
    torch.manual_seed(seed)
    gate = DSelectKGate(P, n, k, gamma, entropy=0.3, reachability=0.2, scale=1.5, **settings).double()
    torch.nn.init.normal_(gate.selector_weight)
    return gate


def results(gate, x, mask=None, by_codes=True):
    """Weights, losses and all gradients of a training pass."""
    gate.zero_grad()
    gate.keeps_contributions = not by_codes
    x = x.clone().requires_grad_()
    routing = gate(x, mask=mask)
    assert routing.in_pairs == by_codes
    values = torch.linspace(-1, 1, gate.num_experts, dtype=x.dtype) ** 3
    (((routing.weights * values).sum(-1) + 0.3).square().sum() + routing.aux_loss).backward()
    found = {name: parameter.grad.clone() for name, parameter in gate.named_parameters()}
    named = {name: getattr(routing, name).detach() for name in ("weights", "selectors", "contributions")}
    return found | named | {"aux_loss": routing.aux_loss.detach(), "x": x.grad}


def assert_equal(found, wanted):
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


@given(
    n=st.integers(1, 40),
    k=st.integers(1, 3),
    gamma=st.sampled_from([1e-4, 1.0, 4.0]),
    rows=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_the_codes_that_rows_reach_equal_all_codes(n, k, gamma, rows, seed):
    gate, mask = selectors(n, k, gamma, seed), torch.rand(rows) > 0.3
    x = torch.randn(rows, P, dtype=torch.float64)
    for given_mask in (None, mask):
        assert_equal(results(gate, x, given_mask), results(gate, x, given_mask, by_codes=False))


def test_losses_of_a_wrapper_and_rows_in_several_dimensions_are_those_of_all_codes():
    inner = selectors(9, 3, 2.0)
    gate, x = RegularizedGate(inner, load_balance=0.5, information=0.3), torch.randn(4, 3, P).double()
    assert_equal(results(gate, x), results(gate, x, by_codes=False))


def test_second_derivatives_are_those_of_finite_differences():
    gate, x = selectors(6, 2, 4.0), torch.randn(3, P, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in gate.named_parameters()]

    def first(*inputs):
        routing = torch.func.functional_call(gate, dict(zip(names, inputs[1:], strict=True)), (inputs[0],))
        assert routing.in_pairs
        loss = (routing.weights * torch.linspace(0, 1, 6).double()).sum() + routing.aux_loss
        return torch.autograd.grad(loss, inputs[0], create_graph=True)[0]

    assert torch.autograd.gradcheck(first, (x, *gate.parameters()))


def test_soft_bits_of_many_experts_compute_all_codes_and_hard_ones_do_not(monkeypatch):
    monkeypatch.undo()
    soft, hard = DSelectKGate(P, 4096, k=2), DSelectKGate(P, 4096, k=2, gamma=1e-4)
    torch.nn.init.normal_(hard.selector_weight)
    x = torch.randn(3, P)
    assert not soft(x).in_pairs
    assert hard(x).in_pairs
    y, routing = MoE(experts=NeuronExperts(4096, P, P), gate=hard)(x)
    y.square().sum().backward()
    assert routing.in_pairs


def test_nan_in_a_parameter_is_not_hidden():
    gate = selectors(300, 1, 1e-4)
    with torch.no_grad():
        gate.selector_weight[0, 0, 0] = float("nan")
    assert gate(torch.randn(2, P, dtype=torch.float64)).weights.isnan().any()
