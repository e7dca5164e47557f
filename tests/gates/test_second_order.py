"""Second derivatives of every gate are right or raise; changes between forward and backward are noticed."""

import os
import subprocess
import sys

import pytest
import torch
from all_gates import GATES, P

from comet_moe.gates import CometGate
from comet_moe.kernels.sinkhorn import sinkhorn_rounds

COMPILED = {"comet"}
"""Gates whose gradient is a compiled loop, which has none itself."""
DOUBLE = {"dtype": torch.float64}


def gate_and_input(name):
    gate = GATES[name]().double()
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return gate, torch.randn(3, P, **DOUBLE, requires_grad=True)


def linear_loss(gate, x):
    """Linear in the weights, so that the gradient that enters the gate's backward needs none itself."""
    routing = gate(x)
    return (routing.weights * torch.linspace(0, 1, gate.num_experts, **DOUBLE)).sum() + routing.aux_loss


@pytest.mark.parametrize("name", sorted(set(GATES) - {"hash", "topk-noise"}))
@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_are_right_or_raise(name, power):
    gate, x = gate_and_input(name)

    def first(x):
        return torch.autograd.grad(linear_loss(gate, x) ** power, x, create_graph=True)[0]

    if name in COMPILED:
        with pytest.raises(RuntimeError, match="no second derivative"):
            first(x).sum().backward()
    else:
        assert torch.autograd.gradcheck(first, (x,))


@pytest.mark.parametrize("name", sorted(COMPILED))
def test_second_derivatives_with_respect_to_parameters_raise(name):
    gate, x = gate_and_input(name)
    parameters = list(gate.parameters())
    grads = torch.autograd.grad(linear_loss(gate, x), parameters, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        sum(grad.sum() for grad in grads).backward()


def test_second_derivatives_of_sinkhorn_rounds_raise_for_a_linear_loss_too():
    logits = torch.randn(3, 3, **DOUBLE, requires_grad=True)
    weights = torch.rand(3, 3, **DOUBLE)
    for power in (1, 2):
        loss = (sinkhorn_rounds(logits, 3) * weights).sum() ** power
        (first,) = torch.autograd.grad(loss, logits, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            first.sum().backward()


SECOND_ORDER = """
import torch
from comet_moe.gates import CometGate
from comet_moe.kernels.sinkhorn import sinkhorn_rounds
torch.manual_seed(0)
gate = CometGate(4, 5, k=2, gamma=3.0, entropy=0.1).double()
weights = torch.linspace(0, 1, 5, dtype=torch.float64)
def loss(x):
    routing = gate(x)
    return (routing.weights * weights).sum() + routing.aux_loss
def first(x):
    return torch.autograd.grad(loss(x), x, create_graph=True)[0]
assert torch.autograd.gradcheck(first, (torch.randn(3, 4, dtype=torch.float64, requires_grad=True),))
logits = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
assert torch.autograd.gradgradcheck(lambda u: sinkhorn_rounds(u, 3), (logits,))
"""


@pytest.mark.slow
def test_the_fix_that_the_error_names_works():
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-c", SECOND_ORDER], env=environment, check=True)


@pytest.mark.parametrize("field", ["contributions", "selectors"])
def test_results_changed_before_backward_are_noticed(field):
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
