"""Trees with a ceiling on their cost: the walk equals the definition, and nothing changes below the limit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import comet_moe.gates.comet as comet
from comet_moe import MoE, RoutingMonitor
from comet_moe.experts import NeuronExperts
from comet_moe.gates import CometGate
from comet_moe.kernels import jit, tree_walk

P = 5


@pytest.fixture(autouse=True)
def _walk_at_any_size(monkeypatch):
    monkeypatch.setattr(jit, "SMALL_WORK", 0)
    monkeypatch.setattr(comet, "WALK_EXPERTS", 1)
    monkeypatch.setattr(comet, "NORMALIZED_EXPERTS", 1)


def trees(n, k, max_paths, gamma=5.0, dtype=torch.float64, seed=0, **settings):
    torch.manual_seed(seed)
    gate = CometGate(P, n, k, gamma, max_paths=max_paths, **settings).to(dtype)
    torch.nn.init.normal_(gate.split_weight)
    return gate


def results(gate, x, mask=None, walks=True):
    """Weights, entropy and all gradients of a training pass, by a walk or by the definition."""
    gate.zero_grad()
    gate.keeps_contributions = not walks
    x = x.clone().requires_grad_()
    routing = gate(x, mask=mask)
    assert (routing.tree_pairs is not None) == walks
    values = torch.linspace(-1, 1, gate.num_experts, dtype=x.dtype) ** 3
    (((routing.weights * values).sum(-1) + 0.3).square().sum() + routing.aux_loss).backward()
    found = {name: parameter.grad.to_dense().clone() for name, parameter in gate.named_parameters()}
    return found | {"weights": routing.weights.detach(), "aux_loss": routing.aux_loss.detach(), "x": x.grad}


def assert_equal(found, wanted):
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


@given(
    n=st.integers(1, 40),
    k=st.integers(1, 3),
    most=st.integers(1, 9),
    gamma=st.sampled_from([1e-4, 2.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_a_walk_equals_the_definition_and_counts_what_it_drops(n, k, most, gamma, seed):
    gate = trees(n, k, most, gamma, seed=seed, entropy=0.3, scale=1.5)
    x, mask = torch.randn(12, P, dtype=torch.float64), torch.rand(12) > 0.3
    for given_mask in (None, mask):
        counts = []
        found = []
        for walks in (True, False):
            gate.cut_trees.zero_()
            found.append(results(gate, x, given_mask, walks))
            counts.append(int(gate.cut_trees))
        assert_equal(*found)
        assert counts[0] == counts[1] <= 12 * k
    assert int(gate.walked_trees) == 4 * 12 * k


@given(n=st.integers(1, 9), most=st.integers(1, 5), seed=st.integers(0, 99))
def test_limited_trees_with_normalised_splits_equal_the_definition(n, most, seed):
    gate = trees(n, 2, most, 3.0, seed=seed, entropy=0.3, balance="normalize")
    x = torch.randn(100, P, dtype=torch.float64)  # many per node: a single one halves it, which is a tie
    assert_equal(results(gate, x), results(gate, x, walks=False))


@given(n=st.integers(1, 40), gamma=st.sampled_from([1e-4, 2.0, 30.0]), seed=st.integers(0, 99))
def test_nothing_changes_where_the_limit_is_not_reached(n, gamma, seed):
    x = torch.randn(9, P, dtype=torch.float64)
    limited, free = (trees(n, 2, most, gamma, seed=seed, entropy=0.1) for most in (n, None))
    free.keeps_contributions = True
    found = results(limited, x)
    assert int(limited.cut_trees) == 0
    assert_equal(found, results(free, x, walks=False))


@pytest.mark.parametrize("grad", [True, False])
def test_evaluation_has_the_same_ceiling_and_counts_nothing(grad):
    gate = trees(33, 2, 3, entropy=0.1)
    x = torch.randn(9, P, dtype=torch.float64)
    wanted = gate(x).weights.detach()
    before = int(gate.cut_trees)
    assert before > 0
    with torch.set_grad_enabled(grad):
        routing = gate.eval()(x)
    torch.testing.assert_close(routing.weights.detach(), wanted)
    assert int(gate.cut_trees) == before
    assert int((routing.weights != 0).sum(1).max()) <= 2 * 3
    torch.testing.assert_close(routing.selectors.sum(-1), torch.ones(9, 2, dtype=torch.float64))


def test_second_derivatives_are_those_of_finite_differences():
    gate, x = trees(9, 2, 3, 8.0, entropy=0.1), torch.randn(3, P, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in gate.named_parameters()]

    def first(*inputs):
        routing = torch.func.functional_call(gate, dict(zip(names, inputs[1:], strict=True)), (inputs[0],))
        assert routing.tree_pairs is not None
        loss = (routing.weights * torch.linspace(0, 1, 9).double()).sum() + routing.aux_loss
        return torch.autograd.grad(loss, inputs[0], create_graph=True)[0]

    assert torch.autograd.gradcheck(first, (x, *gate.parameters()))
    assert int(gate.cut_trees) > 0


@pytest.mark.parametrize("balance", ["normalize", "median"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_statistics_of_balanced_splits_are_of_the_rows_that_keep_them(masked, balance):
    gate, x = trees(21, 2, 3, 4.0, balance=balance), torch.randn(50, P, dtype=torch.float64)
    mask, sums = torch.rand(50) > 0.4 if masked else None, []
    for walks in (True, False):
        gate.split_sums.zero_()
        results(gate, x, mask, walks)
        sums.append(gate.split_sums.clone())
    torch.testing.assert_close(*sums)


def test_threads_change_nothing(monkeypatch):
    gate, x = trees(40, 2, 5, entropy=0.1, balance="median"), torch.randn(101, P, dtype=torch.float64)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(tree_walk, "count_threads", lambda rows, work, most=threads: min(most, rows))
        gate.cut_trees.zero_()
        found.append(results(gate, x) | {"cut": gate.cut_trees.double()})
    assert_equal(*found)


def test_a_permutation_renumbers_limited_trees():
    gate, x = trees(12, 2, 3), torch.randn(9, P, dtype=torch.float64)
    order = torch.randperm(12)
    walked = gate(x)
    gate.keeps_contributions = True
    torch.testing.assert_close(walked.renumbered(order).weights, gate(x).renumbered(order).weights)


def test_soft_trees_of_many_experts_train_within_the_ceiling():
    """65,536 leaves, all soft: a row visits at most 4 nodes of each of 17 levels."""
    gate = CometGate(4, 2**16, k=1, gamma=1e3, max_paths=4, sparse=True)
    moe = MoE(experts=NeuronExperts(2**16, 4, 4, sparse=True), gate=gate)
    y, routing = moe(torch.randn(64, 4))
    y.square().sum().backward()
    assert routing.in_pairs
    assert routing.gate_flops <= 2 * 4 * 64 * 4 * 17
    assert len(routing.pairs().expert) == 64 * 4
    assert int(gate.cut_trees) == int(gate.walked_trees) == 64


def test_the_counts_are_saved_and_the_limit_is_shown():
    gate = trees(12, 2, 3)
    gate(torch.randn(9, P, dtype=torch.float64))
    again = trees(12, 2, 3)
    again.load_state_dict(gate.state_dict())
    assert int(again.cut_trees) == int(gate.cut_trees) > 0
    assert "max_paths=3" in repr(gate)
    with RoutingMonitor(MoE(experts=NeuronExperts(12, P, P), gate=trees(12, 1, 2, dtype=torch.float32))) as m:
        assert m is not None


def test_a_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="max_paths must be an integer of at least 1, got 0"):
        CometGate(P, 8, max_paths=0)
