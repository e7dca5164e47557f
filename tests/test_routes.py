"""Recorded routes, and models that run with them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comet_moe import MoE, Permutation, PermutedGate, gates, record, replay
from comet_moe.experts import DenseExperts
from comet_moe.gates import (
    CometGate,
    DSelectKGate,
    ExpertChoiceGate,
    Gate,
    GateWrapper,
    HashGate,
    ProductKeyGate,
    RegularizedGate,
    ReluGate,
    RescaledGate,
    SoftmaxGate,
    SubsetGate,
    TopKGate,
    UniformGate,
    WarmupGate,
)

P, N, K = 6, 5, 2
GATES = {
    "topk": lambda: TopKGate(P, N, K),
    "switch": lambda: TopKGate(P, N, 1, normalize="all"),
    "sigmoid": lambda: TopKGate(P, N, K, score="sigmoid", scale=2.5),
    "regularized": lambda: RegularizedGate(TopKGate(P, N, K), load_balance=0.1),
    "comet": lambda: CometGate(P, N, K),
    "dselect": lambda: DSelectKGate(P, N, K),
    "softmax": lambda: SoftmaxGate(P, N),
    "relu": lambda: ReluGate(P, N, target=K),
    "expert choice": lambda: ExpertChoiceGate(P, N),
    "hash": lambda: HashGate(9, N),
    "hash-k": lambda: HashGate(9, N, k=K, weights="learned", in_features=P),
    "product keys": lambda: ProductKeyGate(P, N, K, heads=2),
    "subset": lambda: SubsetGate(TopKGate(P, 3, K), [0, 2, 4], N),
    "uniform": lambda: UniformGate(N),
    "rescaled": lambda: RescaledGate(TopKGate(P, N, 1, normalize="all")),
    "warm": lambda: WarmupGate(TopKGate(P, N, K), steps=4),
    "permuted": lambda: PermutedGate(CometGate(P, N, K), Permutation(N, steps=0)),
}
SELECTING = ["topk", "switch", "sigmoid", "regularized"]


class Layers(torch.nn.Module):
    """Two mixtures, one after the other."""

    def __init__(self, gate):
        super().__init__()
        self.first = MoE(experts=DenseExperts(N, P, P), gate=GATES[gate](), return_routing=False)
        self.second = MoE(experts=DenseExperts(N, P, P), gate=GATES[gate](), return_routing=False)

    def forward(self, x, keys, mask=None):
        return self.second(x + self.first(x, keys=keys, mask=mask), keys=keys, mask=mask)


def build(gate):
    torch.manual_seed(0)
    model = Layers(gate)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, keys = torch.randn(3, 4, P), torch.randint(9, (3, 4))
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, :2] = False
    return model, x, keys, mask


def dense(routes, experts=N):
    """(length, layers, n) bool, the experts in an array of routes."""
    routes = torch.as_tensor(routes).long()
    return torch.zeros(*routes.shape[:2], experts + 1, dtype=torch.bool).scatter(-1, routes + 1, True)[
        ..., 1:
    ]


def test_every_gate_is_tested_here():
    public = {kind for kind in map(gates.__getattr__, gates._FILES) if isinstance(kind, type)}
    concrete = {kind for kind in public if issubclass(kind, Gate) and kind not in (Gate, GateWrapper)}
    assert {*concrete, PermutedGate} == {type(make()) for make in GATES.values()}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_replayed_routes_give_the_same_outputs(gate, training):
    model, x, keys, mask = build(gate)
    model.train(training)
    with record(model) as routes:
        wanted = model(x, keys, mask)
    assert [route.shape[:2] for route in routes] == [(4, 2)] * 3
    assert (routes[1][:2] == -1).all()  # padding
    with replay(model, routes), record(model) as again:
        torch.testing.assert_close(model(x, keys, mask), wanted, atol=1e-5, rtol=0)  # the limit asked for
    for one, other in zip(routes, again, strict=True):
        assert torch.equal(dense(one), dense(other))


@pytest.mark.parametrize("gate", [name for name in GATES if name not in ("hash", "hash-k", "expert choice")])
def test_other_routes_are_followed_and_their_weights_have_gradients(gate):
    model, x, keys, _ = build(gate)
    other = torch.stack([torch.randperm(N)[:K] for _ in range(24)]).reshape(3, 4, 2, K)
    with replay(model, other.numpy()), record(model) as routes:
        model(x, keys).square().sum().backward()
    for one, wanted in zip(routes, other, strict=True):
        found, wanted = dense(one), dense(wanted)
        assert not (found & ~wanted).any()
        if gate in SELECTING:
            assert torch.equal(found, wanted)
    trained = [p for p in model.first.gates.parameters() if p.requires_grad and p.grad is not None]
    assert all(parameter.grad.isfinite().all() for parameter in trained)
    has_gradient = any(parameter.grad.any() for parameter in trained)
    assert has_gradient or gate in ("uniform", "warm")  # whose weights are constant, or are so at first


@pytest.mark.parametrize("gate", SELECTING)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_the_weights_of_a_top_k_gate_are_those_of_the_given_experts(gate, seed):
    generator = torch.Generator().manual_seed(seed)
    module, logits = GATES[gate](), torch.randn(7, N, generator=generator, dtype=torch.float64)
    inner = module.gate if gate == "regularized" else module
    experts = torch.stack([torch.randperm(N, generator=generator)[: inner.k] for _ in range(7)])
    with torch.no_grad():  # the logits of a row x are x, for a gate whose weight is the identity
        inner.to(torch.float64).weight.copy_(torch.eye(N, P, dtype=torch.float64))
        inner.bias.zero_()
    x = torch.nn.functional.pad(logits, (0, P - N)).requires_grad_()
    with replay(module, [experts.unsqueeze(1)]):
        weights = module(x).weights
    with_given = torch.full_like(logits, -torch.inf).scatter(1, experts, logits.gather(1, experts))
    if inner.score == "sigmoid":
        wanted = with_given.sigmoid() / with_given.sigmoid().sum(-1, keepdim=True) * inner.scale
    elif inner.normalize == "all":
        wanted = logits.softmax(-1).masked_fill(with_given.isinf(), 0.0)
    else:
        wanted = with_given.softmax(-1)
    torch.testing.assert_close(weights.detach(), wanted)
    assert inner.k == 1 or weights.square().sum().requires_grad


def test_unset_rows_are_routed_by_the_gate_and_unset_slots_are_left_out():
    model, x, keys, _ = build("topk")
    with record(model) as own:
        wanted = model(x, keys)
    unset = torch.full((3, 4, 2, K), -1)
    with replay(model, unset):
        torch.testing.assert_close(model(x, keys), wanted)
    unset[..., 0] = 3
    with replay(model, unset), record(model) as routes:
        model(x, keys)
    assert {int(expert) for route in routes for expert in route[..., 0].flatten()} == {3}
    assert all(route.shape == (4, 2, 1) for route in routes)
    assert len(own) == 3


def test_routes_without_rows_for_padding_are_those_of_the_real_tokens():
    model, x, keys, mask = build("comet")
    with record(model) as routes:
        wanted = model(x, keys, mask)
    routes[1] = routes[1][2:]
    with replay(model, routes):
        torch.testing.assert_close(model(x, keys, mask), wanted, atol=1e-5, rtol=0)


def test_a_batch_of_rows_is_one_array():
    model, x, keys, _ = build("topk")
    with record(model) as routes:
        model(x[0], keys[0])
    assert [route.shape for route in routes] == [(4, 2, K)]


GOOD = torch.zeros(4, 2, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (
            [GOOD.float()] * 3,
            r"^routes\[0\] must be an integer array \(length, layers, k\), got torch.float32",
        ),
        ([GOOD[0]] * 3, r"^routes\[0\] must be an integer array .* shape \(2, 1\)$"),
        ([GOOD[:, :1]] * 3, r"^routes\[0\] has 1 layers, the model has 2$"),
        ([GOOD - 2] * 3, r"^routes\[0\] has the expert -2: an unset slot is -1$"),
        ([GOOD.expand(4, 2, 2)] * 3, r"^routes\[0\] has an expert twice for one token"),
        ([GOOD + N] * 3, r"^the routes have the expert 5 in layer 0, first.gates.0 has 5"),
        ([GOOD[:3]] * 3, r"^the routes of sequence 0 have 3 tokens, the sequence has 4"),
        ([GOOD] * 2, r"^the forward pass has 3 sequences, and 2 arrays of routes are left"),
    ],
)
def test_wrong_routes_are_one_sentence(routes, message):
    model, x, keys, _ = build("topk")
    with pytest.raises(ValueError, match=message), replay(model, routes):
        model(x, keys)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_without_gates_is_an_error():
    message = r"^Linear has no mixtures of experts: give a model with gates of comet_moe.gates"
    with pytest.raises(ValueError, match=message), record(torch.nn.Linear(2, 2)):
        pass
