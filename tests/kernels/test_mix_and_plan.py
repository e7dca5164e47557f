"""The compiled loops of mix.py and plan.py equal the torch versions beside them, in values and gradients."""

import pytest
import torch
from comparing import DOUBLE, assert_same
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.kernels.mix import Epilogue, Places, gather_rows, mix, mix_dense, mix_torch
from comet_moe.kernels.plan import plan_of_pairs, plan_of_pairs_torch, plan_of_weights, plan_of_weights_torch


def sparse_weights(rows, n, tasks, seed):
    torch.manual_seed(seed)
    return [torch.rand(rows, n, **DOUBLE) * (torch.rand(rows, n) < 0.3) for _ in range(tasks)]


@given(rows=st.integers(0, 9), n=st.integers(1, 9), tasks=st.integers(1, 3), seed=st.integers(0, 99))
def test_plan(rows, n, tasks, seed):
    weights = sparse_weights(rows, n, tasks, seed)
    fast, plain = plan_of_weights(weights), plan_of_weights_torch(weights)
    assert fast.counts == plain.counts
    for got, wanted in ((fast.rows, plain.rows), *zip(fast.places, plain.places, strict=True)):
        assert torch.equal(got, wanted)
    assert_same(
        lambda *w: plan_of_weights(list(w)).weights,
        lambda *w: plan_of_weights_torch(list(w)).weights,
        *weights,
    )


@pytest.mark.parametrize("rows", [0, 1, 37])
def test_plan_of_pairs(rows):
    n = 5
    sample, expert = (torch.rand(rows, n) < 0.4).nonzero(as_tuple=True)
    weights = torch.rand(len(sample), 2)
    fast = plan_of_pairs(sample, expert, weights, rows, n)
    plain = plan_of_pairs_torch(sample, expert, weights, rows, n)
    assert fast.counts == plain.counts
    for got, wanted in ((fast.rows, plain.rows), *zip(fast.places, plain.places, strict=True)):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(("sample", "expert"), [([0, 1], [0, 4]), ([0, 1], [-1, 0]), ([0, 3], [0, 0])])
def test_pairs_that_do_not_exist_are_refused(sample, expert):
    pairs = torch.tensor(sample), torch.tensor(expert), torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"must name rows 0..2 and experts 0..3, got"):
        plan_of_pairs(*pairs, 3, 4)


@given(
    rows=st.integers(0, 9),
    n=st.integers(1, 6),
    u=st.integers(1, 70),
    tasks=st.integers(1, 3),
    relu=st.booleans(),
    seed=st.integers(0, 99),
)
def test_mix_of_pairs_and_of_all(rows, n, u, tasks, relu, seed):
    plan = plan_of_weights(sparse_weights(rows, n, tasks, seed))
    z = torch.randn(len(plan.rows), u, **DOUBLE)
    epilogue = Epilogue(relu=relu)
    assert_same(
        lambda z, w: mix(z, w, plan.places, epilogue),
        lambda z, w: mix_torch(z, w, plan.places, epilogue),
        z,
        plan.weights,
    )
    assert_same(
        lambda z, w: mix_dense(z, w, epilogue),
        lambda z, w: torch.bmm(w, z.relu() if relu else z),
        torch.randn(rows, n, u, **DOUBLE),
        torch.randn(rows, tasks, n, **DOUBLE),
    )


@given(rows=st.integers(1, 9), n=st.integers(1, 6), seed=st.integers(0, 99))
def test_gather_rows(rows, n, seed):
    plan = plan_of_weights(sparse_weights(rows, n, 2, seed))
    x = torch.randn(rows, 5, **DOUBLE)
    assert_same(lambda x: gather_rows(x, plan.rows, plan.places), lambda x: x[plan.rows], x)


@pytest.mark.parametrize("dropout", [0.5, 0.3, 0.9])
def test_dropout_has_the_statistics_of_torchs(dropout):
    rows, u = 400, 333
    places = Places(torch.arange(rows), torch.arange(rows + 1))
    ones = torch.ones(rows, u, requires_grad=True)
    out = mix(ones, torch.ones(rows, 1), places, Epilogue(dropout=dropout)).squeeze(1)
    kept = out != 0
    assert torch.equal(out[kept], torch.full_like(out[kept], 1 / (1 - dropout)))
    deviation = (dropout * (1 - dropout) / (rows * u)) ** 0.5
    assert abs(kept.float().mean().item() - (1 - dropout)) < 5 * deviation
    by_row, by_column = kept.float().mean(1), kept.float().mean(0)
    assert by_row.std().item() == pytest.approx((dropout * (1 - dropout) / u) ** 0.5, rel=0.2)
    assert by_column.std().item() == pytest.approx((dropout * (1 - dropout) / rows) ** 0.5, rel=0.2)
    neighbours = torch.corrcoef(torch.stack((kept[:, :-1].flatten(), kept[:, 1:].flatten())).float())[0, 1]
    assert abs(neighbours.item()) < 5 / (rows * u) ** 0.5
    out.sum().backward()
    assert torch.equal(ones.grad, out.detach())  # backward drops what forward dropped
    again = mix(ones, torch.ones(rows, 1), places, Epilogue(dropout=dropout)).squeeze(1)
    assert not torch.equal(again, out)


def test_dropout_follows_the_seed():
    places = Places(torch.arange(9), torch.arange(10))

    def drawn():
        torch.manual_seed(3)
        return mix(torch.ones(9, 40), torch.ones(9, 1), places, Epilogue(dropout=0.5))

    assert torch.equal(drawn(), drawn())


def test_a_value_below_zero_and_one_that_is_no_number_through_relu():
    places = Places(torch.arange(2), torch.tensor([0, 1, 2]))
    z = torch.tensor([[-float("inf"), 1.0], [float("nan"), 2.0]])
    out = mix(z, torch.ones(2, 1), places, Epilogue(relu=True)).squeeze(1)
    torch.testing.assert_close(out, z.relu(), equal_nan=True)
