"""The compiled loops of gathered.py equal the torch versions beside them, and differentiate each other."""

import pytest
import torch
from comparing import assert_same
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.kernels import jit
from comet_moe.kernels.gathered import Form, dot, dot_torch, outer, outer_torch, pairing, total, total_torch

SAMPLES, ROWS, VECTORS, WIDTH, P = 4, 6, 2, 3, 5


def made_pairs(samples=SAMPLES, rows=ROWS, seed=0):
    torch.manual_seed(seed)
    sample, row = (torch.rand(samples, rows) < 0.4).nonzero(as_tuple=True)
    return pairing(sample, row, samples, rows)


def operands(pairs, dtype=torch.float64):
    x = torch.randn(len(pairs.start) - 1, VECTORS, P, dtype=dtype)
    c = torch.randn(len(pairs.row), VECTORS, WIDTH, dtype=dtype)
    return x, c, torch.randn(ROWS, WIDTH, P, dtype=dtype)


@given(samples=st.integers(0, 7), seed=st.integers(0, 99))
def test_values_and_gradients_are_those_of_the_definitions(samples, seed):
    pairs = made_pairs(samples, seed=seed)
    x, c, table = operands(pairs)
    assert_same(lambda x, w: dot(x, w, pairs), lambda x, w: dot_torch(x, w, pairs), x, table)
    assert_same(lambda c, w: total(c, w, pairs), lambda c, w: total_torch(c, w, pairs), c, table)


def test_the_three_products_are_the_derivatives_of_one_form():
    pairs = made_pairs()
    x, c, table = (value.requires_grad_() for value in operands(pairs))
    form = (c * dot_torch(x, table, pairs)).sum()
    of_c, of_x, of_table = torch.autograd.grad(form, (c, x, table))
    with torch.no_grad():
        torch.testing.assert_close(dot(x, table, pairs), of_c)
        torch.testing.assert_close(total(c, table, pairs), of_x)
        torch.testing.assert_close(outer(c, x, Form(pairs, False, ROWS, torch.float64)), of_table)
        torch.testing.assert_close(outer_torch(c, x, pairs), of_table[pairs.by_row.row])


@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_first_and_second_derivatives_are_those_of_finite_differences(path, monkeypatch):
    monkeypatch.setattr(jit, "SMALL_WORK", 0 if path == "compiled" else float("inf"))
    pairs = made_pairs()
    x, c, table = (value.requires_grad_() for value in operands(pairs))
    for function, values in ((dot, x), (total, c)):
        assert torch.autograd.gradcheck(lambda v, w, f=function: f(v, w, pairs), (values, table))
        assert torch.autograd.gradgradcheck(lambda v, w, f=function: f(v, w, pairs), (values, table))


@pytest.mark.parametrize("path", ["compiled", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_gradients_have_the_values_of_dense_ones_in_the_rows_of_the_pairs(path, dtype, monkeypatch):
    monkeypatch.setattr(jit, "SMALL_WORK", 0 if path == "compiled" else float("inf"))
    pairs = made_pairs()
    x, c, table = operands(pairs, torch.float32)
    for function, values in ((dot, x), (total, c)):
        gradients = []
        for sparse in (False, True):
            leaf = table.detach().clone().to(dtype).requires_grad_()
            function(values, leaf, pairs, sparse).square().sum().backward()
            gradients.append(leaf.grad)
        dense, rows = gradients
        assert rows.dtype == dense.dtype == dtype
        assert rows.is_sparse
        assert rows._indices()[0].tolist() == pairs.row.unique().tolist()
        assert torch.equal(rows.to_dense(), dense)


@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_a_bfloat16_table_is_computed_in_float32(path, monkeypatch):
    monkeypatch.setattr(jit, "SMALL_WORK", 0 if path == "compiled" else float("inf"))
    pairs = made_pairs()
    x, c, table = operands(pairs, torch.float32)
    stored = table.bfloat16()
    # Sums of at most 2 · 6 · 3 products of size 1, in two orders.
    torch.testing.assert_close(dot(x, stored, pairs), dot_torch(x, stored.float(), pairs), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        total(c, stored, pairs), total_torch(c, stored.float(), pairs), atol=1e-5, rtol=0
    )


def test_row_sparse_gradients_refuse_second_derivatives():
    pairs = made_pairs()
    x, _, table = (value.requires_grad_() for value in operands(pairs))
    with pytest.raises(
        RuntimeError, match="row-sparse gradients have no second derivatives: set sparse=False"
    ):
        torch.autograd.grad(dot(x, table, pairs, True).sum(), table, create_graph=True)


def test_threads_compute_what_one_thread_does(monkeypatch):
    pairs = made_pairs(40)
    x, c, table = operands(pairs)
    one = [dot(x, table, pairs), total(c, table, pairs), outer(c, x, Form(pairs, True, ROWS, c.dtype))]
    monkeypatch.setattr("comet_moe.kernels.gathered.count_threads", lambda rows, work: min(3, rows))
    three = [dot(x, table, pairs), total(c, table, pairs), outer(c, x, Form(pairs, True, ROWS, c.dtype))]
    assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(one, three, strict=True))


def test_pairs_that_no_loop_may_read_are_refused():
    with pytest.raises(ValueError, match=r"must name experts 0\.\.5, got 0\.\.6"):
        pairing(torch.tensor([0, 1]), torch.tensor([0, 6]), SAMPLES, ROWS)
    with pytest.raises(ValueError, match="ordered by sample"):
        pairing(torch.tensor([1, 0]), torch.tensor([0, 1]), SAMPLES, ROWS)


@pytest.mark.parametrize("shape", [(SAMPLES, 1, P + 1), (SAMPLES + 1, 1, P)])
def test_values_that_do_not_fit_the_table_or_the_pairs_are_refused(shape):
    pairs, table = made_pairs(), torch.zeros(ROWS, WIDTH, P)
    with pytest.raises(ValueError, match=r"values of shape \(4, \.\.\., 5\) and a table of 6 rows"):
        dot(torch.zeros(shape), table, pairs)
    with pytest.raises(ValueError, match=r"6 rows are needed, got shapes \(4, 1, 5\) and \(5, 3, 5\)"):
        dot(torch.zeros(SAMPLES, 1, P), table[1:], pairs)
    with pytest.raises(ValueError, match=r"are needed, got shapes \(1, 1, 3\)"):
        total(torch.zeros(1, 1, WIDTH), table, pairs)
