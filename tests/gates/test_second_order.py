"""Second derivatives of every gate are right; changes between forward and backward are noticed."""

import pytest
import torch
from all_gates import GATES, P, keys_of

from comet_moe.gates import CometGate
from comet_moe.kernels import jit
from comet_moe.kernels.sinkhorn import sinkhorn_rounds

DOUBLE = {"dtype": torch.float64}


def gate_and_input(name):
    gate = GATES[name]().double()
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return gate, torch.randn(3, P, **DOUBLE, requires_grad=True)


def linear_loss(gate, x):
    """Linear in the weights, so that the gradient that enters the gate's backward needs none itself."""
    routing = gate(x, keys=keys_of(x))
    return (routing.weights * torch.linspace(0, 1, gate.num_experts, **DOUBLE)).sum() + routing.aux_loss


@pytest.fixture(params=["compiled", "torch"])
def path(request, monkeypatch):
    """Both ways to compute, whatever the work is."""
    monkeypatch.setattr(jit, "SMALL_WORK", 0 if request.param == "compiled" else float("inf"))


@pytest.mark.parametrize("name", sorted(set(GATES) - {"hash", "topk-noise"}))
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.usefixtures("path")
def test_second_derivatives_are_those_of_finite_differences(name, power):
    gate, x = gate_and_input(name)

    def first(x):
        return torch.autograd.grad(linear_loss(gate, x) ** power, x, create_graph=True)[0]

    assert torch.autograd.gradcheck(first, (x,))


def called_twice(std, x):
    """A gate on its own output: the second input depends on all parameters. From 32 experts on rows walk."""
    gate = CometGate(40, 40, k=2).double()
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return gate, linear_loss(gate, 40 * gate(x).weights)


@pytest.mark.parametrize("std", [0.1, 1.0])  # splits are soft, and all hard
@pytest.mark.usefixtures("path")
def test_gradients_with_a_graph_of_a_gate_on_its_own_output_are_those_without(std):
    gate, loss = called_twice(std, torch.randn(5, 40, **DOUBLE))
    wanted = torch.autograd.grad(loss, tuple(gate.parameters()), retain_graph=True)
    got = torch.autograd.grad(loss, tuple(gate.parameters()), create_graph=True)
    for ours, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.detach(), expected)


@pytest.mark.usefixtures("path")
def test_second_derivatives_of_a_gate_on_its_own_output_are_those_of_finite_differences():
    def loss(x):
        torch.manual_seed(0)
        return called_twice(0.1, x)[1]

    assert torch.autograd.gradgradcheck(loss, (torch.randn(2, 40, **DOUBLE, requires_grad=True),))


@pytest.mark.usefixtures("path")
def test_a_gate_of_one_expert_has_second_derivatives_of_zero():
    gate, x = CometGate(P, 1, k=2, entropy=0.1).double(), torch.randn(3, P, **DOUBLE, requires_grad=True)
    assert not torch.autograd.functional.hessian(lambda x: linear_loss(gate, x), x).any()


@pytest.mark.usefixtures("path")
def test_second_derivatives_of_sinkhorn_rounds_are_those_of_finite_differences():
    logits = torch.randn(2, 3, 3, **DOUBLE, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda u: sinkhorn_rounds(u, 3), (logits,))


@pytest.mark.parametrize("field", ["contributions", "selectors"])
def test_results_changed_before_backward_are_noticed(field, monkeypatch):
    monkeypatch.setattr(jit, "SMALL_WORK", 0)  # torch's own operators do not read the selectors again
    routing = CometGate(P, 6, k=2)(torch.randn(3, P))
    loss = routing.weights.square().sum()
    with torch.no_grad():
        getattr(routing, field).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_changed_before_backward_leave_the_gradient_as_it_was():
    gate, x = CometGate(P, 6, k=2, gamma=5.0), torch.randn(3, P, requires_grad=True)
    wanted = torch.autograd.grad(gate(x).weights.square().sum(), x)[0]
    loss = gate(x).weights.square().sum()
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.add_(1)
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], wanted)


@pytest.mark.usefixtures("path")
def test_saved_tensors_may_be_packed():
    """As activation offloading does; what comes back need not be contiguous."""

    def unpack(packed):
        return packed.transpose(0, -1).contiguous().transpose(0, -1) if packed.dim() > 1 else packed

    gate, x = CometGate(P, 6, k=2, gamma=5.0), torch.randn(3, P, requires_grad=True)
    logits = torch.randn(2, 3, 3, requires_grad=True)
    wanted = torch.autograd.grad(gate(x).weights.square().sum(), x)[0]
    wanted_soft = torch.autograd.grad(sinkhorn_rounds(logits, 3).square().sum(), logits)[0]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = gate(x).weights.square().sum()
        soft_loss = sinkhorn_rounds(logits, 3).square().sum()
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], wanted)
    torch.testing.assert_close(torch.autograd.grad(soft_loss, logits)[0], wanted_soft)
