"""Soft trees and Sinkhorn rounds equal their torch versions, in values and gradients."""

import pytest
import torch
from comparing import DOUBLE, assert_same
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.kernels.sinkhorn import sinkhorn_rounds, sinkhorn_rounds_torch
from comet_moe.kernels.soft_trees import soft_trees, soft_trees_torch


@given(n=st.integers(1, 12), rounds=st.integers(0, 9), trees=st.integers(1, 3), seed=st.integers(0, 99))
def test_sinkhorn_rounds_equal_the_torch_version(n, rounds, trees, seed):
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
def test_soft_trees_equal_the_torch_version(n, k, gamma, rows, seed):
    torch.manual_seed(seed)
    splits, alphas = torch.randn(rows, k, n - 1, **DOUBLE), torch.randn(rows, k, n, **DOUBLE)
    assert_same(
        lambda *logits: soft_trees(*logits, gamma),
        lambda *logits: soft_trees_torch(*logits, gamma),
        splits,
        alphas,
    )


def test_soft_trees_refuse_shapes_and_types_that_do_not_fit():
    alphas = torch.zeros(2, 3, 4)
    for splits in (torch.zeros(2, 3, 4), torch.zeros(2, 2, 3), torch.zeros(1, 3, 3), torch.zeros(2, 9)):
        with pytest.raises(ValueError, match=r"splits must have shape \(2, 3, 3\) and dtype torch.float32"):
            soft_trees(splits, alphas, 1.0)
    with pytest.raises(ValueError, match=r"dtype torch.float32 .* torch.float64"):
        soft_trees(torch.zeros(2, 3, 3, **DOUBLE), alphas, 1.0)
    with pytest.raises(ValueError, match=r"leaf logits must have shape \(B, k, n\)"):
        soft_trees(torch.zeros(2, 3), torch.zeros(2, 4), 1.0)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (2, 4, 3)])
def test_sinkhorn_rounds_refuse_matrices_that_are_not_square(shape):
    with pytest.raises(ValueError, match="logits must be square matrices"):
        sinkhorn_rounds(torch.zeros(shape), 3)


def test_sinkhorn_rounds_of_no_matrices_are_none():
    assert sinkhorn_rounds(torch.zeros(0, 3, 3), 2).shape == (0, 3, 3)
    assert sinkhorn_rounds(torch.zeros(2, 0, 0), 2).shape == (2, 0, 0)
