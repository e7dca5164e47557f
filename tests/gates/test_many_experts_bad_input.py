"""Few, many and odd numbers of experts, few and masked rows, NaN: each right, or one sentence."""

import pytest
import torch

from comet_moe import MoE
from comet_moe.experts import NeuronExperts
from comet_moe.gates import CometGate, ProductKeyGate

P, U = 4, 3
GATES = {
    "comet": lambda n: CometGate(P, n, k=2, gamma=0.5, entropy=0.1, sparse=True),
    "balanced": lambda n: CometGate(P, n, k=2, gamma=0.01, balance="median", sparse=True),
    "normalised": lambda n: CometGate(P, n, k=2, gamma=0.01, balance="normalize", max_paths=4, sparse=True),
    "few paths": lambda n: CometGate(P, n, k=2, max_paths=2, sparse=True),
    "product keys": lambda n: ProductKeyGate(P, n, k=2, heads=2),
}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("n", [1, 2, 3, 33, 1000])
def test_any_number_of_experts_and_of_rows_trains(name, n):
    moe = MoE(experts=NeuronExperts(n, P, U, sparse=True), gate=GATES[name](n))
    for rows, is_masked in ((0, False), (1, False), (5, False), (5, True)):
        x = torch.randn(rows, P, requires_grad=True)
        mask = torch.zeros(rows, dtype=torch.bool) if is_masked else None
        moe.zero_grad()
        y, routing = moe(x, mask=mask)
        (y.square().sum() + routing.aux_loss).backward()
        assert y.shape == (rows, U)
        assert torch.isfinite(y).all()
        assert torch.isfinite(x.grad).all()
        sums = routing.weights.sum(-1)
        torch.testing.assert_close(sums, torch.zeros(rows) if is_masked else torch.ones(rows))
        assert not (is_masked and y.any())


def test_more_choices_than_experts_are_as_many_as_there_are():
    assert ProductKeyGate(P, 3, k=9).k == 3
    routing = CometGate(P, 2, k=9)(torch.randn(4, P))
    torch.testing.assert_close(routing.weights.sum(-1), torch.ones(4))


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_with_their_number(name, value):
    x = torch.randn(5, P)
    x[2, 1] = value
    with pytest.raises(ValueError, match="must be finite, got 1 NaN or infinite values of 20"):
        GATES[name](100)(x)


@pytest.mark.slow
def test_sixteen_million_experts_train():
    n = 2**24
    experts = NeuronExperts(n, 1, 1, sparse=True, dtype=torch.bfloat16)
    y, routing = MoE(experts=experts, gate=ProductKeyGate(1, n, k=2, heads=2, query_features=4))(
        torch.randn(7, 1)
    )
    y.square().sum().backward()
    assert routing.in_pairs
    assert experts.inner.grad._nnz() <= 28
