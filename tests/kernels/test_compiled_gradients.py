"""Soft trees and Sinkhorn rounds equal their torch versions, in values and gradients."""

import pytest
import torch
from comparing import DOUBLE, assert_same
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.gates import CometGate
from comet_moe.kernels.sinkhorn import sinkhorn_rounds, sinkhorn_rounds_torch


@given(n=st.integers(1, 12), rounds=st.integers(0, 9), trees=st.integers(1, 3), seed=st.integers(0, 99))
def test_sinkhorn(n, rounds, trees, seed):
    torch.manual_seed(seed)
    logits = torch.randn(trees, n, n, **DOUBLE)
    assert_same(lambda u: sinkhorn_rounds(u, rounds), lambda u: sinkhorn_rounds_torch(u, rounds), logits)


@given(
    n=st.integers(1, 40),
    k=st.integers(1, 5),
    gamma=st.sampled_from([1e-3, 1.0, 30.0]),
    rows=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_soft_trees(n, k, gamma, rows, seed):
    torch.manual_seed(seed)
    gate = CometGate(3, n, k, gamma)
    splits, alphas = torch.randn(rows, k, n - 1, **DOUBLE), torch.randn(rows, k, n, **DOUBLE)
    assert_same(gate._trees, gate._trees_torch, splits, alphas)


def test_a_second_derivative_is_refused_not_silently_wrong():
    logits = torch.randn(3, 3, requires_grad=True)
    (first,) = torch.autograd.grad(sinkhorn_rounds(logits, 3).square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()
