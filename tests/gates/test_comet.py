"""CometGate: the tree shape, exactness, and numbers far from the middle."""

import math

import pytest
import torch
from gate_laws import assert_uniform
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.gates import CometGate
from comet_moe.gates.smoothing import smooth_step, smooth_step_sides
from comet_moe.kernels.soft_trees import log_smooth_step_sides, path_sums


def leaf_of_node(node, n):
    """Position from left to right of the leaf at a heap index, from the order in which they are visited."""
    leaves = []

    def visit(q):
        if q >= n - 1:
            leaves.append(q)
        else:
            visit(2 * q + 1)
            visit(2 * q + 2)

    visit(0)
    return leaves.index(node)


def reached_leaf(node_goes_left, n):
    """The leaf a hard path ends at, by walking the heap one node at a time."""
    node = 0
    while node < n - 1:
        node = 2 * node + 1 if node_goes_left[node] else 2 * node + 2
    return leaf_of_node(node, n)


def hard_gate(p, n, k):
    """A gate whose every split is far outside the smooth-step for inputs of ordinary size."""
    gate = CometGate(p, n, k, gamma=1e-3)
    torch.nn.init.normal_(gate.split_weight)
    return gate


def test_leaves_of_five_experts_are_in_left_to_right_order():
    assert [leaf_of_node(node, 5) for node in (7, 8, 4, 5, 6)] == [0, 1, 2, 3, 4]


@given(n=st.integers(1, 70))
def test_tree_has_the_papers_number_of_leaves_at_each_depth(n):
    lengths = path_sums(torch.ones(n - 1), torch.ones(n - 1))
    d = (n - 1).bit_length()
    assert int((lengths == d).sum()) == (2 * n - 2**d if n > 1 else 1)
    assert int((lengths == d - 1).sum()) == (2**d - n if n > 1 else 0)


@given(n=st.integers(1, 40), k=st.integers(1, 5), seed=st.integers(0, 99))
def test_hard_trees_select_the_leaf_their_path_ends_at(n, k, seed):
    torch.manual_seed(seed)
    gate, x = hard_gate(6, n, k), torch.randn(9, 6)
    logits = torch.einsum("kqp,bp->bkq", gate.split_weight, x) + gate.split_bias
    routing = gate(x)
    hard = (routing.selectors.amax(-1) == 1).all(-1)
    assert hard.float().mean() > 0.7
    for row in hard.nonzero().flatten().tolist():
        leaves = {reached_leaf(logits[row, tree] > 0, n) for tree in range(k)}
        assert set(routing.weights[row].nonzero().flatten().tolist()) <= leaves
        assert len(routing.weights[row].nonzero()) <= k
        assert abs(routing.weights[row].sum().item() - 1) < 1e-6


@given(n=st.integers(1, 20), k=st.integers(1, 4), seed=st.integers(0, 99))
def test_weights_are_the_ratio_of_the_papers_equation(n, k, seed):
    torch.manual_seed(seed)
    gate = CometGate(5, n, k, gamma=2.0).double()
    torch.nn.init.normal_(gate.split_weight, std=0.3)
    x = torch.randn(7, 5, dtype=torch.float64)
    h = smooth_step(torch.einsum("kqp,bp->bkq", gate.split_weight, x) + gate.split_bias, 2.0)
    v = torch.ones(7, k, n, dtype=torch.float64)
    for node in range(n - 1, 2 * n - 1):
        child = node
        while child > 0:
            parent = (child - 1) // 2
            branch = h[:, :, parent] if child == 2 * parent + 1 else 1 - h[:, :, parent]
            v[:, :, leaf_of_node(node, n)] *= branch
            child = parent
    e = torch.exp(torch.einsum("knp,bp->bkn", gate.leaf_weight, x) + gate.leaf_bias) * v
    torch.testing.assert_close(gate(x).weights, e.sum(1) / e.sum((1, 2)).unsqueeze(-1))
    torch.testing.assert_close(gate(x).selectors, v)


def test_smooth_step_is_exact_at_and_beyond_its_ends_with_zero_slope():
    t = torch.tensor([-1e6, -0.5, 0.5, 1e6], requires_grad=True)
    left, right = smooth_step_sides(t, 1.0)
    assert left.tolist() == [0, 0, 1, 1]
    assert right.tolist() == [1, 1, 0, 0]
    left.sum().backward()
    assert t.grad.tolist() == [0, 0, 0, 0]


@given(st.floats(-0.6, 0.6), st.floats(1e-4, 1e4))
def test_smooth_step_is_the_papers_cubic(t, gamma):
    t = t * gamma
    cubic = -2 / gamma**3 * t**3 + 1.5 / gamma * t + 0.5
    wanted = 0.0 if t <= -gamma / 2 else 1.0 if t >= gamma / 2 else cubic
    got = smooth_step(torch.tensor(t, dtype=torch.float64), gamma)
    assert math.isclose(float(got), wanted, abs_tol=1e-12)


def test_log_of_a_cut_side_has_gradient_zero_not_nan():
    t = torch.tensor([-3.0, 3.0], requires_grad=True)
    left, _ = log_smooth_step_sides(t, 1.0)
    left.exp().sum().backward()
    assert left.tolist() == [float("-inf"), 0.0]
    assert t.grad.tolist() == [0, 0]


@pytest.mark.parametrize("gamma", [1e-4, 1e-2, 1.0, 1e2, 1e4])
@pytest.mark.parametrize("size", [0.0, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_finite(gamma, size, dtype):
    gate = CometGate(4, 9, k=12, gamma=gamma, entropy=1.0).to(dtype)
    x = (size * torch.randn(50, 4, dtype=dtype)).requires_grad_()
    routing = gate(x)
    (routing.weights.square().sum() + routing.aux_loss).backward()
    for value in (routing.weights, routing.aux_loss, x.grad, *(p.grad for p in gate.parameters())):
        assert torch.isfinite(value).all()
    assert (routing.weights.sum(-1) - 1).abs().max() < 1e-6


def test_leaf_logits_of_ten_thousand_keep_the_simplex():
    gate = CometGate(3, 7, k=3)
    with torch.no_grad():
        gate.leaf_bias.uniform_(-1e4, 1e4)
    x = torch.randn(20, 3, requires_grad=True)
    weights = gate(x).weights
    weights.square().sum().backward()
    assert (weights.sum(-1) - 1).abs().max() < 1e-6
    assert torch.isfinite(x.grad).all()


def test_a_new_gate_has_small_uniform_splits_and_leaves():
    gate = CometGate(100, 64, k=40, gamma=7.0)
    for split in (gate.split_weight, gate.split_bias):
        assert_uniform(split, 7.0 / 100)
    for leaf in (gate.leaf_weight, gate.leaf_bias):
        assert_uniform(leaf, 0.05)


def test_a_new_gate_is_soft_and_near_uniform():
    weights = CometGate(16, 8, k=2)(torch.randn(100, 16)).weights
    assert (weights > 1e-3).all()
    assert weights.mean(0).max() < 2 / 8


def test_entropy_loss_is_the_batch_mean_in_training_only():
    gate, x = CometGate(4, 6, k=3, entropy=0.7), torch.randn(10, 4)
    v = gate(x).selectors
    wanted = 0.7 * (-(v * (v + 1e-6).log())).sum((1, 2)).mean()
    torch.testing.assert_close(gate(x).aux_loss, wanted)
    assert float(gate.eval()(x).aux_loss) == 0


@pytest.mark.parametrize("rows", [0, 1, 5000])
def test_any_batch_size(rows):
    routing = CometGate(4, 5, k=2, entropy=1.0)(torch.randn(rows, 4))
    assert routing.weights.shape == (rows, 5)
    assert torch.isfinite(routing.aux_loss)


def test_it_has_no_logits():
    assert CometGate(4, 5)(torch.randn(3, 4)).logits is None
