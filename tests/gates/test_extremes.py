"""Every gate and loss at the limits: sizes, widths of the smooth step, inputs, weights, precisions, rows."""

import math

import pytest
import torch

from comet_moe import Permutation, PermutedGate, sinkhorn
from comet_moe.gates import (
    CometGate,
    DSelectKGate,
    ExpertChoiceGate,
    HashGate,
    RegularizedGate,
    ReluGate,
    SoftmaxGate,
    TopKGate,
    WarmupGate,
)

P = 4
SIZES = (1, 2, 3, 17, 2**16)
GAMMAS = (1e-4, 1.0, 1e4)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ROWS = (0, 1, 5)
SCALES = (0.0, 1.0, 1e6, 1e30)
SQUARED = ("relu", "losses")
"""What is squared: the weights of ReMoE in this test, the logits in the z-loss."""


def k_of(n):
    return min(2, n)


GATES = {
    "comet": lambda n, gamma: CometGate(P, n, k=k_of(n), gamma=gamma, entropy=0.1),
    "dselect": lambda n, gamma: DSelectKGate(P, n, k=k_of(n), gamma=gamma, entropy=0.1, reachability=0.1),
}
WITHOUT_GAMMA = {
    "topk": lambda n: TopKGate(P, n, k=k_of(n)),
    "sigmoid": lambda n: TopKGate(P, n, k=k_of(n), score="sigmoid"),
    "noisy": lambda n: TopKGate(P, n, k=k_of(n), noise=True),
    "softmax": lambda n: SoftmaxGate(P, n),
    "relu": lambda n: ReluGate(P, n, target=k_of(n)),
    "expert choice": lambda n: ExpertChoiceGate(P, n),
    "hash": lambda n: HashGate(7, n),
    "warm-up": lambda n: WarmupGate(TopKGate(P, n, k=k_of(n)), steps=3),
    "losses": lambda n: RegularizedGate(SoftmaxGate(P, n), load_balance=0.1, z_loss=0.1, information=0.1),
}
SMALL_ONLY = {"permuted": lambda n: PermutedGate(TopKGate(P, n, k=k_of(n)), Permutation(n, steps=2))}


def scales(name, gamma, dtype):
    """Scales of inputs whose derivatives, up to 1.5/γ times the input, can be numbers of ``dtype``."""
    largest = torch.finfo(dtype).max * min(1.0, gamma) / 1e3
    return [s for s in SCALES if s <= (math.sqrt(largest) if name in SQUARED else largest)]


def check(gate, rows, scale, dtype):
    """Outputs and gradients are finite, weights are not negative and sum to one where the gate says so."""
    x = (scale * torch.randn(rows, P)).to(dtype).requires_grad_()
    keys = torch.arange(rows) % 7
    for training in (True, False):
        routing = gate.train(training)(x, keys=keys)
        weights = routing.weights
        assert weights.shape == (rows, gate.num_experts)
        assert torch.isfinite(weights).all()
        assert torch.isfinite(routing.aux_loss)
        assert (weights >= 0).all()
        if gate.sums_to_one and rows:
            # Each of up to n terms is rounded once, and so is each sum of them on the way to the whole.
            error = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(weights.dtype, 1e-5)
            error += math.sqrt(gate.num_experts) * torch.finfo(torch.float32).eps
            torch.testing.assert_close(
                weights.double().sum(-1), torch.ones(rows).double(), atol=error, rtol=0
            )
        if training and weights.requires_grad:
            (weights.square().sum() + routing.aux_loss).backward()
            assert all(p.grad is None or torch.isfinite(p.grad).all() for p in gate.parameters())
            assert x.grad is None or torch.isfinite(x.grad).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("name", GATES)
def test_gates_of_trees_and_selectors(name, gamma, dtype):
    for n in SIZES:
        gate = GATES[name](n, gamma).to(dtype)
        for rows in ROWS:
            for scale in scales(name, gamma, dtype):
                check(gate, rows, scale, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", {**WITHOUT_GAMMA, **SMALL_ONLY, **GATES})
def test_subnormal_weights(name, dtype):
    tiny = torch.finfo(dtype).smallest_normal / 8
    for n in SIZES[:-1]:
        gate = GATES[name](n, 1.0) if name in GATES else {**WITHOUT_GAMMA, **SMALL_ONLY}[name](n)
        gate = gate.to(dtype)
        with torch.no_grad():
            for parameter in gate.parameters():
                parameter.uniform_(-1, 1).mul_(tiny)
        for scale in scales(name, 1.0, dtype):
            check(gate, 5, scale, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", {**WITHOUT_GAMMA, **SMALL_ONLY})
def test_other_gates_and_losses(name, dtype):
    for n in SIZES if name in WITHOUT_GAMMA else SIZES[:-1]:
        gate = {**WITHOUT_GAMMA, **SMALL_ONLY}[name](n).to(dtype)
        for rows in ROWS:
            for scale in scales(name, 1.0, dtype):
                check(gate, rows, scale, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("tau", [1e-7, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("n", [1, 2, 64])
def test_sinkhorn(n, tau, dtype):
    for scale in SCALES:
        logits = (scale * torch.randn(n, n, dtype=dtype)).requires_grad_()
        soft = sinkhorn(logits, tau=tau, iterations=20)
        soft.square().sum().backward()
        assert torch.isfinite(soft).all()
        assert torch.isfinite(logits.grad).all()
        torch.testing.assert_close(soft.sum(-2), torch.ones(n, dtype=dtype), atol=1e-4, rtol=0)
