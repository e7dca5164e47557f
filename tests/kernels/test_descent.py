"""The descent gives the weights of the dense COMET gate, wherever its parameters and inputs are."""

import os
import threading

import pytest
import torch
from comparing import DOUBLE
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.gates import CometGate
from comet_moe.kernels.descent import descend, read_trees
from comet_moe.kernels.descent_op import descend_op


def comet(n, k, gamma, dtype=torch.float64, p=6):
    gate = CometGate(p, n, k, gamma).to(dtype).eval()
    torch.nn.init.normal_(gate.split_weight)
    return gate


@given(
    n=st.integers(1, 40),
    k=st.integers(1, 5),
    gamma=st.sampled_from([1e-3, 1.0, 30.0]),  # hard, mixed and soft paths
    rows=st.integers(0, 20),
    seed=st.integers(0, 99),
)
def test_descent_gives_the_dense_gates_weights(n, k, gamma, rows, seed):
    torch.manual_seed(seed)
    gate = comet(n, k, gamma)
    x = torch.randn(rows, 6, **DOUBLE)
    dense = gate(x)  # with gradients: every node
    with torch.no_grad():
        routing = gate(x)
        assert routing.in_pairs
        torch.testing.assert_close(routing.weights, dense.weights, atol=1e-12, rtol=0)
        assert torch.equal(routing.weights != 0, dense.weights != 0)
        assert (routing.pairs().sample.diff() >= 0).all()


@pytest.mark.parametrize("gamma", [0.1, 1.0, 10.0])
def test_descent_in_float32_is_within_a_millionth(gamma):
    gate = comet(64, 2, gamma, torch.float32, p=32)
    # Split logits of the size of γ: where they are far larger, a soft path depends on digits that float32
    # does not have, in either order of summation.
    torch.nn.init.normal_(gate.split_weight, std=gamma / 32**0.5)
    x = torch.randn(500, 32)
    dense = gate(x).weights
    with torch.no_grad():
        assert (gate(x).weights - dense).abs().max() < 1e-6


def test_descent_follows_the_parameters_wherever_they_go():
    gate, x = comet(8, 2, 1.0, torch.float32), torch.randn(5, 6)

    def check(gate, x):
        with torch.no_grad():
            got = gate(x).weights
        torch.testing.assert_close(got, gate(x).weights.detach(), atol=1e-6, rtol=0)

    check(gate, x)
    with torch.no_grad():
        gate.split_weight.mul_(-1)
    check(gate, x)
    gate.leaf_weight = torch.nn.Parameter(torch.randn(2, 8, 6))
    check(gate, x)
    gate.load_state_dict(comet(8, 2, 1.0, torch.float32).state_dict())
    check(gate, x)
    check(gate.double(), x.double())
    check(gate.bfloat16(), x)
    with torch.no_grad():
        gate.split_weight.mul_(-1)
    check(gate, x)


def test_descent_takes_rows_of_any_layout_and_refuses_nan():
    gate = comet(8, 2, 1.0, torch.float32)
    x = torch.randn(3, 4, 6)
    with torch.no_grad():
        weights = gate(x).weights
        assert weights.shape == (3, 4, 8)
        torch.testing.assert_close(gate(x.transpose(0, 1)).weights, weights.transpose(0, 1))
        x[1, 2, 3] = float("nan")
        with pytest.raises(ValueError, match="must be finite, got 1 NaN"):
            gate(x)
        with pytest.raises(ValueError, match="must be finite"):
            gate(x.reshape(12, 6))


@pytest.mark.parametrize("transposed", [False, True])
def test_parameters_and_rows_may_have_any_layout(transposed):
    """The walk reads memory by address: what is strided, negated by a flag or expanded has to be copied."""
    gate, x = comet(8, 2, 1.0), torch.randn(5, 6, **DOUBLE)
    strided = gate.leaf_weight.detach().transpose(0, 2).contiguous().transpose(0, 2)
    trees = [-gate.split_weight.detach(), torch.zeros(2, 1, **DOUBLE).expand(2, 7), strided, gate.leaf_bias]
    wanted = descend(x, read_trees([tree.detach().clone() for tree in trees], x.dtype), 1.0)
    trees[0] = torch._neg_view(gate.split_weight.detach())
    rows = torch._neg_view(-x).T.contiguous().T if transposed else torch._neg_view(-x)
    got = descend(rows, read_trees(trees, x.dtype), 1.0)
    assert (got.expert == wanted.expert).all()
    assert (got.weight == wanted.weight).all()


def test_logits_that_are_not_finite_are_not_routed_as_if_they_were():
    gate, x = comet(32, 1, 30.0, torch.float32), torch.randn(2, 6)
    with torch.no_grad():
        bad = x.clone()
        bad[1, 2] = float("inf")
        with pytest.raises(ValueError, match="must be finite"):
            gate(bad)
        gate.leaf_bias[0, 3] = float("nan")
        assert gate(x).weights.isnan().any()


def parameters_of(gate):
    return [gate.split_weight, gate.split_bias, gate.leaf_weight, gate.leaf_bias]


@pytest.mark.parametrize("gamma", [1e-3, 30.0])  # hard paths, and more experts than there are slots
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_operator_keeps_a_bad_row_to_itself(gamma, bad):
    gate, x = comet(32, 2, gamma), torch.randn(5, 6, **DOUBLE)
    spoiled = x.clone()
    spoiled[3] = bad
    with torch.no_grad():
        wanted = descend_op(x, *parameters_of(gate), gamma)
        weights = descend_op(spoiled, *parameters_of(gate), gamma)
    assert weights[3].isnan().all()
    others = [0, 1, 2, 4]
    torch.testing.assert_close(weights[others], wanted[others], atol=1e-12, rtol=0)


def test_the_operator_leaves_out_a_leaf_of_minus_infinity_as_the_dense_gate_does():
    gate, x = comet(6, 2, 30.0), torch.randn(5, 6, **DOUBLE)
    with torch.no_grad():
        gate.leaf_bias[:, 2] = -float("inf")
        weights = descend_op(x, *parameters_of(gate), gate.gamma)
        torch.testing.assert_close(
            weights, gate._route_dense(x, None, gate.gamma).weights, atol=1e-12, rtol=0
        )
    assert (weights[:, 2] == 0).all()


def test_transforms_run_the_torch_version():
    gate, x = comet(6, 2, 1.0), torch.randn(4, 6, **DOUBLE)
    by_row = torch.vmap(lambda row: gate(row[None]).weights[0])(x)
    torch.testing.assert_close(by_row, gate(x).weights)
    got = torch.func.grad(lambda x: gate(x).weights[:, 0].sum())(x)
    leaf = x.clone().requires_grad_()
    gate(leaf).weights[:, 0].sum().backward()
    torch.testing.assert_close(got, leaf.grad)


def test_sixteen_thousand_experts_need_memory_by_k_not_by_n():
    gate, x = comet(16_384, 2, 1e-4, torch.float32, p=16), torch.randn(4096, 16)
    with torch.no_grad():
        expert, weight = gate(x)._slots
    assert expert.shape == weight.shape == (4096, 16)  # 8 slots per tree


@pytest.mark.parametrize("k", [1, 3])
def test_rows_with_hundreds_of_leaves_among_rows_with_few(k):
    """More leaves than a group of rows has capacity for: those rows walk one by one."""
    gate, x = comet(300, k, 1.0, torch.float64, p=16), torch.randn(100, 16, dtype=torch.float64)
    torch.nn.init.normal_(gate.split_weight)
    x[::3] *= 0.01
    with torch.no_grad():
        weights = gate(x).weights
    assert (weights[::3] != 0).sum(1).min() == 300
    assert (weights[1::3] != 0).sum(1).median() < 100
    torch.testing.assert_close(
        weights, gate._route_dense(x, None, gate.gamma).weights.detach(), rtol=0, atol=1e-12
    )


def big_batch():
    gate, x = comet(256, 2, 1e-2, torch.float32, p=64), torch.randn(4096, 64)
    with torch.no_grad():
        return gate, x, gate(x).weights


def test_threads_may_call_at_the_same_time():
    gate, x, wanted = big_batch()
    wrong = []

    def work():
        with torch.no_grad():
            for _ in range(5):
                if not torch.equal(gate(x).weights, wanted):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_can_call():
    gate, x, wanted = big_batch()
    child = os.fork()
    if child == 0:
        with torch.no_grad():  # compared by numpy: torch's own threads do not survive a fork
            first, second = (gate(x)._slots[1].numpy() for _ in range(2))
            os._exit(0 if (first == second).all() else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    with torch.no_grad():
        assert torch.equal(gate(x).weights, wanted)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("split_weight", (2, 5, 6)),
        ("split_weight", (2, 4)),
        ("split_bias", (2, 5)),
        ("split_bias", (1, 4)),
        ("leaf_weight", (2, 5, 7)),
        ("leaf_weight", (10, 6)),
        ("leaf_weight", (0, 5, 6)),
        ("leaf_bias", (2, 4)),
        ("leaf_bias", (3, 5)),
    ],
)
def test_parameters_of_other_shapes_are_refused(name, shape):
    gate = comet(5, 2, 1.0)
    setattr(gate, name, torch.nn.Parameter(torch.zeros(shape, **DOUBLE)))
    with torch.no_grad(), pytest.raises(ValueError, match=r"must have shapes \(k, n-1, p\), .* got"):
        gate(torch.zeros(3, 6, **DOUBLE))


@pytest.mark.parametrize("x", [torch.zeros(3, 5, **DOUBLE), torch.zeros(6, **DOUBLE), torch.zeros(3, 6)])
def test_rows_of_other_shapes_and_types_are_refused(x):
    gate = comet(5, 2, 1.0)
    trees = read_trees([gate.split_weight, gate.split_bias, gate.leaf_weight, gate.leaf_bias], torch.float64)
    with pytest.raises(ValueError, match=r"x must have shape \(B, 6\) and dtype torch.float64, got"):
        descend(x, trees, 1.0)
