"""Training over visited nodes equals training over all nodes, in every value and gradient."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import comet_moe
import comet_moe.gates.comet as comet
from comet_moe import LazyAdam, MoE
from comet_moe.experts import DenseExperts
from comet_moe.gates import CometGate, RegularizedGate, SubsetGate, TopKGate
from comet_moe.gates.losses import Regularizer
from comet_moe.kernels import jit, tree_walk
from comet_moe.kernels.sparse_trees import visit_trees, visit_trees_torch
from comet_moe.kernels.tree_walk import walk_trees

P = 7


@pytest.fixture(autouse=True)
def _walk_at_any_size(monkeypatch):
    monkeypatch.setattr(jit, "SMALL_WORK", 0)
    monkeypatch.setattr(comet, "WALK_EXPERTS", 1)
    monkeypatch.setattr(comet, "NORMALIZED_EXPERTS", 1)
    monkeypatch.setattr(tree_walk, "WALK_SHARE", 1.0)


def trees(n, k, gamma=1.0, dtype=torch.float64, seed=0, **settings):
    torch.manual_seed(seed)
    gate = CometGate(P, n, k, gamma, **settings).to(dtype)
    torch.nn.init.normal_(gate.split_weight)
    return gate


def results(gate, x, mask=None, walks=True, loss=None):
    """Weights, loss and all gradients of a training pass, by a walk or over all nodes."""
    inner = [module for module in gate.modules() if isinstance(module, CometGate)]
    x = x.clone().requires_grad_()
    for parameter in gate.parameters():
        parameter.grad = None
    for module in inner:
        module.keeps_contributions = not walks
    routing = gate(x, mask=mask)
    assert (routing.tree_pairs is not None) == walks
    values = torch.linspace(-1, 1, routing.num_experts, dtype=x.dtype) ** 3
    total = (routing.weights * values).square().sum() + routing.aux_loss
    if loss is not None:
        total = total + loss(routing)
    total.backward()
    grads = {name: parameter.grad.to_dense() for name, parameter in gate.named_parameters()}
    return {"weights": routing.weights.detach(), "loss": total.detach(), "x": x.grad} | grads


def assert_equal(got, wanted, tolerance=1e-5):
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance, msg=name)


@given(
    n=st.integers(1, 70),
    k=st.integers(1, 4),
    gamma=st.sampled_from([1e-4, 1.0, 5.0, 30.0]),
    rows=st.integers(0, 40),
    balance=st.sampled_from([None, "normalize"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_a_walk_equals_a_pass_over_all_nodes(n, k, gamma, rows, balance, dtype, seed):
    dtype = torch.float64 if balance else dtype  # else a row beside the edge of a split may be on either side
    gate = trees(n, k, gamma, dtype, seed, entropy=0.3, scale=1.5, balance=balance)
    x, mask = torch.randn(rows, P, dtype=dtype), torch.rand(rows) > 0.3
    for given_mask in (None, mask):
        assert_equal(results(gate, x, given_mask), results(gate, x, given_mask, walks=False))


@pytest.mark.parametrize("shape", [(12,), (2, 3, 2)])
def test_trees_are_known_from_their_leaves(shape):
    gate, x = trees(9, 3), torch.randn(*shape, P, dtype=torch.float64)
    mask = torch.arange(12).reshape(shape) % 3 != 0
    walked = gate(x, mask=mask)
    gate.keeps_contributions = True
    dense = gate(x, mask=mask)
    for name in ("selectors", "contributions", "weights"):
        torch.testing.assert_close(getattr(walked, name), getattr(dense, name))
    found, wanted = walked.statistics(), dense.statistics()
    for name in ("tree_entropy", "one_hot_trees", "information", "selection_information"):
        assert found[name] == pytest.approx(wanted[name])
    torch.testing.assert_close(torch.tensor(found["leaf_share"]), torch.tensor(wanted["leaf_share"]))
    order = torch.randperm(9)
    assert walked.renumbered(order).contributions is None
    torch.testing.assert_close(walked.renumbered(order).weights, dense.renumbered(order).weights)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda gate: RegularizedGate(gate, information=0.7),
        lambda gate: RegularizedGate(gate, load_balance=0.5),
        lambda gate: SubsetGate(gate, [5, 0, 3, 1, 4, 7, 2, 6, 9], 11),
    ],
)
def test_auxiliary_losses_and_wrappers_are_those_of_all_nodes(wrap, masked):
    gate, x = wrap(trees(9, 3, entropy=0.1)), torch.randn(20, P, dtype=torch.float64)
    mask = torch.rand(20) > 0.4 if masked else None
    assert_equal(results(gate, x, mask), results(gate, x, mask, walks=False))


def test_a_loss_over_several_gates_reads_pairs():
    x, loss = torch.randn(20, P, dtype=torch.float64), Regularizer(load_balance=1.0, information=1.0)
    found = []
    for keeps in (False, True):
        gates = [trees(9, k, seed=k) for k in (1, 3)]
        routings = []
        for gate in gates:
            gate.keeps_contributions = keeps
            routings.append(gate(x))
        loss(routings).backward()
        assert [routing.in_pairs for routing in routings] == [not keeps] * 2
        found.append({str(i): gate.split_weight.grad for i, gate in enumerate(gates)})
    assert_equal(*found)


def test_second_derivatives_are_those_of_finite_differences():
    gate, x = trees(5, 2, 3.0, entropy=0.1), torch.randn(3, P, dtype=torch.float64, requires_grad=True)

    def first(*inputs):
        routing = torch.func.functional_call(gate, dict(zip(names, inputs[1:], strict=True)), (inputs[0],))
        assert routing.tree_pairs is not None
        loss = (routing.weights * torch.linspace(0, 1, 5).double()).sum() + routing.aux_loss
        return torch.autograd.grad(loss, inputs[0], create_graph=True)[0]

    names = [name for name, _ in gate.named_parameters()]
    assert torch.autograd.gradcheck(first, (x, *gate.parameters()))


def test_second_derivatives_of_normalised_trees_are_those_of_all_nodes():
    """Finite differences would move the probabilities to reach a node too, which are constants."""
    gate = trees(9, 2, 3.0, entropy=0.1, balance="normalize")
    x, found = torch.randn(20, P, dtype=torch.float64, requires_grad=True), []
    for walks in (True, False):
        gate.keeps_contributions = not walks
        loss = gate(x).weights.square().sum()
        inputs = [x, *gate.parameters()]
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs)
        found.append({str(i): grad for i, grad in enumerate(second)})
    assert_equal(*found)


@given(n=st.integers(1, 30), gamma=st.sampled_from([1e-4, 2.0, 20.0]), seed=st.integers(0, 99))
def test_the_torch_definition_has_the_values_of_the_walk(n, gamma, seed):
    gate, x = trees(n, 2, gamma, seed=seed), torch.randn(6, P, dtype=torch.float64)
    parameters = [gate.split_weight, gate.split_bias, gate.leaf_weight, gate.leaf_bias]
    walk = walk_trees(x, parameters, gamma, None, False)
    wanted = visit_trees_torch(walk, gamma, x, *parameters)
    for found, value in zip(visit_trees(walk, x, parameters, gamma), wanted, strict=True):
        torch.testing.assert_close(found, value)


@pytest.mark.parametrize("gamma", [1e-4, 5.0])
def test_threads_change_nothing(gamma, monkeypatch):
    gate, x = trees(40, 2, gamma, entropy=0.1, balance="median"), torch.randn(101, P, dtype=torch.float64)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(tree_walk, "count_threads", lambda rows, work, most=threads: min(most, rows))
        gate.split_sums.zero_()
        found.append(results(gate, x) | {"sums": gate.split_sums.clone()})
    assert_equal(*found)


@pytest.mark.parametrize("balance", ["normalize", "median"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_statistics_of_balanced_splits_are_those_of_all_nodes(masked, balance):
    gate, x = trees(21, 2, 2.0, balance=balance), torch.randn(50, P, dtype=torch.float64)
    mask, sums = torch.rand(50) > 0.4 if masked else None, []
    for walks in (True, False):
        gate.split_sums.zero_()
        results(gate, x, mask, walks)
        sums.append(gate.split_sums.clone())
    torch.testing.assert_close(*sums)


@pytest.mark.parametrize("balance", [None, "normalize"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_gradient(reentrant, balance):
    gate, x = (
        trees(40, 2, entropy=0.1, balance=balance),
        torch.randn(30, P, dtype=torch.float64, requires_grad=True),
    )
    found = []
    for run in (gate, lambda x: checkpoint(lambda x: gate(x).weights, x, use_reentrant=reentrant)):
        gate.zero_grad()
        weights = run(x)
        weights = weights if isinstance(weights, torch.Tensor) else weights.weights
        weights.square().sum().backward()
        found.append({name: parameter.grad.clone() for name, parameter in gate.named_parameters()})
    assert_equal(*found)


@pytest.mark.parametrize("settings", [{}, {"balance": "normalize", "max_paths": 2}])
def test_sparse_gradients_hold_the_visited_rows_and_equal_the_dense_ones(settings):
    x = torch.randn(3, P, dtype=torch.float64)
    wanted = results(trees(64, 2, 0.5, entropy=0.1, **settings), x)
    gate = trees(64, 2, 0.5, entropy=0.1, sparse=True, **settings)
    assert_equal(results(gate, x), wanted)
    for parameter in gate.parameters():
        assert parameter.grad.is_sparse
        assert parameter.grad._nnz() < 64
    before = gate.leaf_weight.detach().clone()
    LazyAdam(gate.parameters(), lr=0.1).step()
    is_visited = gate.leaf_weight.grad.to_dense().abs().sum(-1) > 0
    moved = (gate.leaf_weight != before).any(-1)
    assert torch.equal(moved, is_visited)


def test_hard_trees_have_gradients_of_zero_for_splits_and_not_none():
    gate = trees(64, 1, 1e-6)
    gate(torch.randn(9, P, dtype=torch.float64)).weights.square().sum().backward()
    assert gate.split_weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("execution", ["dense", "sparse", "auto"])
def test_a_mixture_of_pairs_equals_one_of_weights(execution):
    found = []
    for walks in (True, False):
        moe = MoE(experts=DenseExperts(40, P, 5), gate=trees(40, 2, dtype=torch.float32)).train()
        moe.gate.keeps_contributions, moe.execution = not walks, execution
        torch.manual_seed(3)
        for parameter in moe.experts.parameters():
            torch.nn.init.normal_(parameter)
        y, routing = moe(torch.randn(25, P))
        if walks and execution != "dense":
            assert routing.in_pairs, "a tensor of (B, n) was made"
        (y.square().sum() + routing.aux_loss).backward()
        found.append({name: parameter.grad for name, parameter in moe.named_parameters()} | {"y": y})
    scale = max(float(value.detach().abs().max()) for value in found[1].values())
    assert_equal(*({name: value / scale for name, value in part.items()} for part in found))


def test_soft_trees_of_many_experts_are_refused_with_the_memory_and_the_setting(monkeypatch):
    monkeypatch.setattr(comet, "WALK_EXPERTS", 32)
    monkeypatch.setattr(tree_walk, "WALK_SHARE", 0.25)
    x = torch.randn(1024, 4)
    median = 'use max_paths=16, balance="median" with gamma=0.01'
    for balance, remedy in (
        (None, median),
        ("normalize", "use max_paths=16, a gamma below 1000"),
        ("median", "use max_paths=16, a gamma below 1000"),
    ):
        gate = CometGate(4, 2**16, k=1, gamma=1e3, balance=balance)
        with pytest.raises(ValueError, match=rf"65536 experts, which needs 3\.0 GB of memory, .* {remedy}"):
            gate(x)
    for balance in ("normalize", "median"):
        assert CometGate(4, 2**16, k=1, gamma=0.01, balance=balance)(x).in_pairs


@pytest.mark.parametrize("balance", [None, "normalize"])
@pytest.mark.parametrize("n", [1, 2, 33, 100])
def test_empty_and_masked_batches_are_right(n, balance):
    gate = trees(n, 3, entropy=0.1, balance=balance)
    for rows, mask in itertools.product((0, 1, 5), (None, False)):
        x = torch.randn(rows, P, dtype=torch.float64)
        mask = None if mask is None else torch.zeros(rows, dtype=torch.bool)
        got, wanted = results(gate, x, mask), results(gate, x, mask, walks=False)
        assert_equal(got, wanted)


@pytest.mark.parametrize("grad", [True, False])
def test_normalised_trees_walk_in_evaluation_too(grad):
    gate, x = trees(40, 2, 2.0, balance="normalize", sparse=True), torch.randn(9, P, dtype=torch.float64)
    gate(x)
    comet_moe.step(gate)
    gate.eval()
    with torch.set_grad_enabled(grad):
        walked = gate(x)
        assert walked.in_pairs
        gate.keeps_contributions = True
        torch.testing.assert_close(walked.weights, gate(x).weights)
    if grad:
        assert_equal(*(results(gate, x, walks=walks) for walks in (True, False)))


@pytest.mark.parametrize("balance", [None, "normalize"])
def test_nan_in_the_input_or_a_parameter_is_not_hidden(balance):
    gate = trees(40, 1, balance=balance)
    x = torch.randn(6, P, dtype=torch.float64)
    x[2, 3] = float("nan")
    with pytest.raises(ValueError, match="must be finite, got 1 NaN"):
        gate(x)
    with torch.no_grad():
        gate.split_weight[0, 0, 0] = float("nan")
    assert gate(x.nan_to_num()).weights.isnan().all()


@pytest.mark.slow
def test_sixteen_million_experts_train_over_what_rows_visit():
    gate = CometGate(1, 2**24, k=1, gamma=1e-9, sparse=True)
    torch.nn.init.normal_(gate.split_weight)
    routing = gate(torch.randn(40, 1))
    routing.stored_weights.sum().backward()
    assert routing.in_pairs
    assert gate.leaf_weight.grad._nnz() <= 40


def test_sparse_adam_leaves_alone_what_adam_moves_by_momentum():
    """The difference between the two optimisers, in rows that only the first batch visits."""
    moved = []
    for sparse in (False, True):
        gate = trees(64, 2, 1e-6, torch.float32, sparse=sparse)
        optimizer = (LazyAdam if sparse else torch.optim.Adam)([gate.leaf_weight], lr=0.1)
        for row in (torch.ones(1, P), -torch.ones(1, P)):  # no leaf in common
            before = gate.leaf_weight.detach().clone()
            optimizer.zero_grad()
            routing = gate(row)
            routing.pairs().weight[0].backward()
            optimizer.step()
        others = torch.ones(2, 64, dtype=torch.bool)
        others[routing.tree_pairs.tree, routing.tree_pairs.expert] = False
        moved.append(bool((gate.leaf_weight != before)[others].any()))
    assert moved == [True, False]


def test_top_k_has_no_tree_pairs():
    assert TopKGate(P, 4)(torch.randn(2, P)).tree_pairs is None


@given(seed=st.integers(0, 40))
def test_splits_at_the_edge_of_the_smooth_step_have_finite_gradients(seed):
    """Two orders of summing may disagree on which side of ±γ/2 a logit is."""
    torch.manual_seed(seed)
    gate = trees(8, 2, 1.0, torch.float32, seed, entropy=0.1)
    x = torch.randn(1, P)
    with torch.no_grad():
        logits = gate.split_weight @ x[0]
        gate.split_bias.copy_(torch.nextafter(torch.tensor(0.5), torch.tensor(0.0)) - logits)
    found = results(gate, x.expand(60, P))
    assert all(torch.isfinite(value).all() for value in found.values())
