"""Gradients of mixtures beyond the usual: second derivatives, frozen experts, tensors changed in place."""

import pytest
import torch
from torch import nn

from comet_moe import MoE, Permutation, PermutedGate
from comet_moe.experts import ConvExperts, DenseExperts, FeedForwardExperts, MLPExperts, NeuronExperts
from comet_moe.experts.grouped_linear import grouped_linear
from comet_moe.gates import CometGate, DSelectKGate, SoftmaxGate, TopKGate

P, N = 4, 3
DOUBLE = {"dtype": torch.float64}
EXPERTS = {
    "dense_relu": lambda: DenseExperts(N, P, 2),
    "dense_tanh": lambda: DenseExperts(N, P, 2, activation="tanh"),
    "feed_forward": lambda: FeedForwardExperts(N, P, 5, 2),
    "mlp_tanh": lambda: MLPExperts(N, P, (5, 2), activation="tanh"),
    "conv": lambda: ConvExperts(N, (1, 4, 4), filters=(2,), kernel_size=3, units=(2,)),
    "modules": lambda: nn.ModuleList(nn.Sequential(nn.Linear(P, 2), nn.Tanh()) for _ in range(N)),
    "neurons": lambda: NeuronExperts(N, P, 2),
}
GATES = {
    "softmax": lambda p: SoftmaxGate(p, N),
    "topk": lambda p: TopKGate(p, N, k=2),
    "dselect": lambda p: DSelectKGate(p, N, k=2),
    "comet": lambda p: CometGate(p, N, k=2),
    "permuted": lambda p: PermutedGate(CometGate(p, N, k=2), Permutation(N, steps=9, tau=(0.5, 0.1))),
}
EXECUTIONS = ["dense", "sparse", "auto"]


def make(experts, gate, execution):
    torch.manual_seed(0)
    features, shape = (16, (1, 4, 4)) if experts == "conv" else (P, (P,))
    moe = MoE(experts=EXPERTS[experts](), gate=GATES[gate](features), execution=execution).double()
    for parameter in moe.experts.parameters():  # biases of 0 would put hidden units exactly at ReLU's kink
        nn.init.normal_(parameter)
    return moe, torch.randn(8, *shape, **DOUBLE)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("gate", ["softmax", "topk"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_second_derivatives_are_those_of_finite_differences(experts, gate, execution):
    moe, x = make(experts, gate, execution)
    names, parameters = zip(*moe.named_parameters(), strict=True)

    def mixed(x, *parameters):
        return torch.func.functional_call(moe, dict(zip(names, parameters, strict=True)), (x,))[0]

    inputs = [value.detach().requires_grad_() for value in (x, *parameters)]
    assert torch.autograd.gradgradcheck(mixed, inputs, fast_mode=True)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("gate", ["dselect", "comet"])
def test_second_derivatives_of_gates_with_trees_and_selectors_are_right(gate, execution):
    moe, x = make("dense_tanh", gate, execution)
    assert torch.autograd.gradgradcheck(lambda x: moe(x)[0], (x.requires_grad_(),), fast_mode=True)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("experts", ["dense_tanh", "feed_forward", "modules", "neurons"])
@pytest.mark.parametrize("gate", ["comet", "permuted"])
def test_hessians_by_autograd_and_by_torch_func_are_those_of_finite_differences(
    gate, experts, training, execution
):
    moe, x = make(experts, gate, execution)
    moe.train(training)

    def loss(x):
        y, routing = moe(x)
        return y.sum() + routing.aux_loss

    hessian = torch.autograd.functional.hessian(loss, x)
    torch.testing.assert_close(torch.func.hessian(loss)(x), hessian)
    # In one direction, to half of the digits, as central differences have.
    step = 1e-5 * torch.randn_like(x)
    slope = torch.func.grad(loss)
    difference = slope(x + step) - slope(x - step)
    torch.testing.assert_close(2 * torch.tensordot(hessian, step, 2), difference, atol=1e-10, rtol=1e-5)


@pytest.mark.parametrize("experts", ["dense_relu", "feed_forward", "modules"])
def test_frozen_experts_get_no_gradient_and_all_else_the_same(experts):
    gradients = {}
    for frozen in (False, True):
        moe, x = make(experts, "topk", "sparse")
        moe.experts.requires_grad_(not frozen)
        x.requires_grad_()
        moe(x)[0].sin().sum().backward()
        gradients[frozen] = x.grad, moe.gate.weight.grad
        assert all((parameter.grad is None) == frozen for parameter in moe.experts.parameters())
    for got, wanted in zip(gradients[True], gradients[False], strict=True):
        torch.testing.assert_close(got, wanted, atol=0, rtol=0)


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_the_grouped_product_computes_and_keeps_only_what_a_gradient_needs(needed):
    inputs = torch.randn(5, P), torch.randn(N, 2, P), torch.randn(N, 2)
    inputs = [value.requires_grad_(need) for value, need in zip(inputs, needed, strict=True)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        out = grouped_linear(*inputs, [2, 0, 3])
    assert kept == [shape for shape, need in (((N, 2, P), needed[0]), ((5, P), needed[1])) if need]
    products = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            products.append(function.__name__.startswith("mm"))
            return function(*args, **(kwargs or {}))

    with Count():
        out.sum().backward()
    assert sum(products) == (0 if needed[2] else 2)  # one for each expert that has rows
    assert [value.grad is not None for value in inputs] == list(needed)


@pytest.mark.parametrize("execution", ["dense", "sparse"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("experts", EXPERTS)
def test_a_tensor_changed_in_place_before_the_backward_pass_raises_or_does_not_matter(
    experts, gate, execution
):
    def gradients(changed):
        moe, leaf = make(experts, gate, execution)
        leaf.requires_grad_()
        x = leaf * 1
        y, routing = moe(x)
        tensors = dict(moe.named_parameters()) | {"x": x, "weights": routing.weights, "y": y}
        if changed is not None:
            with torch.no_grad():
                tensors[changed].mul_(2)
        y.sum().backward()
        return tensors, {name: p.grad for name, p in moe.named_parameters()} | {"x": leaf.grad}

    tensors, wanted = gradients(None)
    raised = set()
    for changed in tensors:
        try:
            _, got = gradients(changed)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raised.add(changed)
            continue
        for name, gradient in wanted.items():
            if gradient is not None:
                torch.testing.assert_close(got[name], gradient, msg=f"{name} after a change of {changed}")
    # Where the product rule needs a tensor itself and not a copy of it, the change must be seen.
    if gate in ("softmax", "topk"):
        assert {"gates.0.weight", "x"} <= raised
    if experts == "feed_forward":
        assert {"experts.inner.weight", "experts.outer.weight"} <= raised
