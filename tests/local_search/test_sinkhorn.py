"""Sinkhorn, its entropy and the assignment, against the authors' numbers and their laws."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comet_moe import sinkhorn
from comet_moe.local_search import assignment, permutation_entropy

GOLDEN = sorted((Path(__file__).parent.parent / "golden").glob("sinkhorn_*.npz"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_equals_the_authors_numbers(path):
    golden = {name: torch.as_tensor(value) for name, value in np.load(path).items()}
    logits = golden["logits"].requires_grad_()
    soft = sinkhorn(logits, float(golden["tau"]), int(golden["iterations"]))
    (soft * golden["cotangent"]).sum().backward()
    hard = torch.nn.functional.one_hot(assignment(soft), soft.shape[-1])
    for got, name in (
        (soft, "soft"),
        (permutation_entropy(soft), "entropy"),
        (logits.grad, "grad_logits"),
        (hard, "hard"),
    ):
        limit = 1e-5 * max(1.0, float(golden[name].abs().max()))
        assert float((got.detach() - golden[name]).abs().max()) <= limit, name


@given(n=st.integers(1, 12), seed=st.integers(0, 99))
def test_many_rounds_give_a_doubly_stochastic_matrix(n, seed):
    torch.manual_seed(seed)
    soft = sinkhorn(torch.rand(n, n, dtype=torch.float64), tau=0.5, iterations=200)
    ones = torch.ones(n, dtype=torch.float64)
    torch.testing.assert_close(soft.sum(0), ones, atol=1e-9, rtol=0)
    torch.testing.assert_close(soft.sum(1), ones, atol=1e-6, rtol=0)


@given(n=st.integers(1, 16), tau=st.floats(1e-7, 1e-3), seed=st.integers(0, 99))
def test_nothing_is_nan_on_the_papers_schedule(n, tau, seed):
    torch.manual_seed(seed)
    logits = torch.empty(n, n).uniform_(-0.05, 0.05).requires_grad_()
    soft = sinkhorn(logits, tau, 150)
    (soft.square().sum() + permutation_entropy(soft)).backward()
    assert torch.isfinite(soft).all()
    assert torch.isfinite(logits.grad).all()


@given(n=st.integers(1, 9), seed=st.integers(0, 99))
def test_assignment_is_the_best_permutation_and_undoes_one(n, seed):
    torch.manual_seed(seed)
    order = torch.randperm(n)
    soft = torch.nn.functional.one_hot(order, n) + 0.4 * torch.rand(n, n)
    assert torch.equal(assignment(soft), order)


def test_matrices_come_in_batches():
    logits = torch.rand(3, 4, 4)
    soft = sinkhorn(logits, 0.1, 5)
    assert torch.equal(soft[1], sinkhorn(logits[1], 0.1, 5))
    assert torch.equal(assignment(soft)[2], assignment(soft[2]))


def test_an_emptied_row_has_a_finite_entropy():
    soft = torch.tensor([[1.0, 1.0], [0.0, 0.0]], requires_grad=True)
    permutation_entropy(soft).backward()
    assert torch.isfinite(soft.grad).all()
