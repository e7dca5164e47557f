"""Derivatives by every interface of torch: the same, or one sentence. Finite differences are elsewhere."""

import pytest
import torch
from all_gates import GATES, P, keys_of
from torch import func

from comet_moe import MoE, Permutation, PermutedGate, sinkhorn
from comet_moe.experts import ConvExperts, DenseExperts, FeedForwardExperts, NeuronExperts
from comet_moe.gates import CometGate, ProductKeyGate, TopKGate, WarmupGate
from comet_moe.kernels import jit

DOUBLE = {"dtype": torch.float64}
MORE = {
    "comet of 40": lambda: CometGate(P, 40, k=2, entropy=0.1),
    "sparse comet": lambda: CometGate(P, 64, k=2, sparse=True),
    "permuted": lambda: PermutedGate(CometGate(P, 6, k=2), Permutation(6, steps=9, tau=(0.5, 0.1))),
    "warming": lambda: WarmupGate(CometGate(P, 6, k=2), steps=4),
}
MOVING = {"comet-normalize", "comet-median", "sigmoid", "quantile", "relu", "expert-choice", "product-keys"}
ALL = {name: make for name, make in (GATES | MORE).items() if name not in ("topk-noise", "hash")}
EXPERTS = {
    "swiglu": lambda n: FeedForwardExperts(n, P, 5, 2, "swiglu"),
    "dense": lambda n: DenseExperts(n, P, 2, activation="tanh"),
    "neurons": lambda n: NeuronExperts(n, P, 2, activation="gelu"),
    "pooled": lambda n: ConvExperts(n, (1, 3, 4), (2,), 2, units=(2,)),
}
ROUTERS = {
    "comet": lambda: CometGate(P, 6, k=2),
    "topk": lambda: TopKGate(P, 6, k=2),
    "product keys": lambda: ProductKeyGate(P, 64, k=2),
    "sparse comet": lambda: CometGate(P, 64, k=2, sparse=True),
}


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def path(request, monkeypatch):
    """Both ways to compute, whatever the work is."""
    monkeypatch.setattr(jit, "SMALL_WORK", 0 if request.param == "compiled" else float("inf"))


def filled(module, training):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return module.double().train(training)


def loss_of(gate):
    def loss(x):
        keys = keys_of(x)
        routing = gate(x, keys=keys)
        return (routing.weights * torch.linspace(0, 1, gate.num_experts, **DOUBLE)).sum() + routing.aux_loss

    return loss


def check_all(loss, x):
    """The second derivative in one direction, by every interface."""
    slope = torch.randn_like(x)
    by_backward = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(by_backward), by_backward, create_graph=True)
    (first * slope).sum().backward()  # as a loss on gradients does
    wanted = by_backward.grad
    hessians = {
        "functional.hessian": torch.autograd.functional.hessian(loss, x),
        "jacobian of a gradient": torch.autograd.functional.jacobian(
            lambda z: torch.autograd.grad(loss(z), z, create_graph=True)[0], x
        ),
        "func.hessian": func.hessian(loss)(x),
        "jacrev twice": func.jacrev(func.jacrev(loss))(x),
    }
    for name, hessian in hessians.items():
        got = torch.tensordot(hessian, slope, x.dim())
        torch.testing.assert_close(got, wanted, msg=lambda message, name=name: f"{name}: {message}")
    torch.testing.assert_close(func.jvp(func.grad(loss), (x,), (slope,))[1], wanted)
    together = func.vmap(func.grad(loss))(torch.stack([x, x + slope]))
    torch.testing.assert_close(together, torch.stack([func.grad(loss)(x), func.grad(loss)(x + slope)]))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_every_interface_has_the_same_second_derivatives_of_a_gate(name, training):
    loss, x = loss_of(filled(ALL[name](), training)), torch.randn(3, P, **DOUBLE)
    if training and name in MOVING:
        with pytest.raises(ValueError, match=r"Gate moves its buffers in training, .* call eval\(\) first"):
            func.grad(loss)(x)
    else:
        check_all(loss, x)


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("name", ROUTERS)
def test_every_interface_has_the_same_second_derivatives_of_a_mixture(name, experts):
    gate = ROUTERS[name]()
    moe = MoE(experts=EXPERTS[experts](gate.num_experts), gate=gate, return_routing=False)
    filled(moe, training=name != "product keys")
    shape = (1, 3, 4) if experts == "pooled" else (P,)

    def loss(x):
        return (moe(x) * torch.linspace(-1, 1, 2, **DOUBLE)).sum()

    check_all(loss, torch.randn(2, *shape, **DOUBLE))


@pytest.mark.parametrize("experts", EXPERTS)
def test_vmap_cannot_run_pairs_and_says_so(experts):
    moe = MoE(experts=EXPERTS[experts](6), gate=CometGate(P, 6, k=2), execution="sparse")
    x = torch.randn(2, 3, *((1, 3, 4) if experts == "pooled" else (P,)))
    with pytest.raises(ValueError, match=r'vmap cannot select pairs, .* set execution to "dense" or "auto"'):
        func.vmap(lambda rows: moe(rows)[0])(x)


def test_every_interface_has_the_same_second_derivatives_of_sinkhorn():
    def loss(logits):
        return (
            sinkhorn(logits, tau=0.5, iterations=3) * torch.linspace(-1, 1, 16, **DOUBLE).view(4, 4)
        ).sum()

    check_all(loss, torch.randn(4, 4, **DOUBLE))
