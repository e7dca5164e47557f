"""LazyAdam computes what torch.optim.SparseAdam does, on compiled and on torch's path."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from comet_moe import LazyAdam
from comet_moe.kernels import jit

SETTINGS = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-7}


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def path(request, monkeypatch):
    monkeypatch.setattr(jit, "SMALL_WORK", 0 if request.param == "compiled" else float("inf"))


def trained(optimiser, shape, gradients, dtype=torch.float64):
    """A parameter after a step with each of the gradients."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape, dtype=dtype))
    steps = optimiser([parameter], **SETTINGS)
    for grad in gradients:
        parameter.grad = grad.to(dtype)
        steps.step()
    return parameter.detach(), steps


def sparse_gradient(shape, indices, seed=0):
    torch.manual_seed(seed)
    values = torch.randn(indices.shape[1], *shape[len(indices) :], dtype=torch.float64)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


@given(rows=st.lists(st.integers(0, 8), max_size=9), again=st.lists(st.integers(0, 8), max_size=9))
def test_rows_in_any_order_and_more_than_once_move_as_sparse_adam_moves_them(rows, again):
    gradients = [
        sparse_gradient((9, 4), torch.tensor([ids], dtype=torch.int64), seed)
        for seed, ids in enumerate((rows, again))
    ]
    for dtype, error in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        found, wanted = (
            trained(kind, (9, 4), gradients, dtype)[0] for kind in (LazyAdam, torch.optim.SparseAdam)
        )
        torch.testing.assert_close(found, wanted, rtol=error, atol=error)


@pytest.mark.parametrize("shape", [(9,), (5, 3, 2), (4, 5, 3)])
@pytest.mark.parametrize("sparse_dims", [1, 2])
def test_gradients_of_any_rank_are_rows(shape, sparse_dims):
    sparse_dims = min(sparse_dims, len(shape))
    indices = torch.stack([torch.tensor([3, 0, 3]) % size for size in shape[:sparse_dims]])
    gradients = [sparse_gradient(shape, indices)] * 2
    found, wanted = (trained(kind, shape, gradients)[0] for kind in (LazyAdam, torch.optim.SparseAdam))
    torch.testing.assert_close(found, wanted)


def test_bfloat16_and_parameters_out_of_order_move_too():
    gradient = sparse_gradient((6, 4), torch.tensor([[1, 4]]))
    found, wanted = (
        trained(kind, (6, 4), [gradient], torch.bfloat16)[0] for kind in (LazyAdam, torch.optim.SparseAdam)
    )
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0)
    transposed = nn.Parameter(torch.zeros(4, 6).t())
    transposed.grad = gradient.float()
    LazyAdam([transposed], lr=0.1).step()
    assert (transposed != 0).any(1).nonzero().flatten().tolist() == [1, 4]


def test_a_state_that_was_saved_continues_with_the_same_numbers():
    gradient = sparse_gradient((9, 4), torch.tensor([[2, 5]]))
    whole, _ = trained(LazyAdam, (9, 4), [gradient] * 3)
    half, optimizer = trained(LazyAdam, (9, 4), [gradient] * 2)
    parameter = nn.Parameter(half.clone())
    resumed = LazyAdam([parameter])
    resumed.load_state_dict(optimizer.state_dict())
    parameter.grad = gradient
    resumed.step()
    torch.testing.assert_close(parameter.detach(), whole, rtol=0, atol=0)


def test_a_closure_is_called_with_gradients_on_and_its_loss_returned():
    table = nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()

    def closure():
        loss = table(torch.tensor([1])).sum()
        loss.backward()
        return loss

    assert LazyAdam(table.parameters()).step(closure) == before[1].sum()
    assert (table.weight != before).any(1).nonzero().flatten().tolist() == [1]


def test_threads_move_what_one_thread_moves(monkeypatch):
    gradient = sparse_gradient((50, 4), torch.arange(0, 50, 3).unsqueeze(0))
    one, _ = trained(LazyAdam, (50, 4), [gradient] * 2)
    monkeypatch.setattr("comet_moe.kernels.lazy_adam.count_threads", lambda rows, work: min(3, rows))
    assert torch.equal(one, trained(LazyAdam, (50, 4), [gradient] * 2)[0])


def test_dense_gradients_and_wrong_settings_are_refused():
    parameter = nn.Parameter(torch.zeros(3, 2))
    parameter.grad = torch.ones(3, 2)
    with pytest.raises(
        ValueError, match=r"needs row-sparse gradients, got torch\.strided .* \(3, 2\): set spa"
    ):
        LazyAdam([parameter]).step()
    for settings, says in (
        ({"lr": -1}, "lr must"),
        ({"eps": 0}, "eps must"),
        ({"betas": (1, 0)}, "betas must"),
    ):
        with pytest.raises(ValueError, match=says):
            LazyAdam([parameter], **settings)


def test_a_gradient_that_names_a_row_outside_the_parameter_is_refused():
    parameter = nn.Parameter(torch.zeros(3, 2))
    parameter.grad = torch.sparse_coo_tensor(
        torch.tensor([[0, 3]]), torch.ones(2, 2), (3, 2), check_invariants=False, is_coalesced=True
    )
    with pytest.raises(ValueError, match=r"must name rows 0\.\.2, got 0\.\.3"):
        LazyAdam([parameter]).step()
