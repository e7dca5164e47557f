"""MoE and MultiGateMoE: dense and sparse execution agree, and only what is selected runs."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from comet_moe import MoE, MultiGateMoE, Permutation, PermutedGate, Routing
from comet_moe.experts import ConvExperts, DenseExperts, FeedForwardExperts, MLPExperts, ModuleExperts
from comet_moe.gates import CometGate, DSelectKGate, Gate, HashGate, SoftmaxGate, TopKGate
from comet_moe.mixture.dispatch import run_indexed
from comet_moe.routing import Pairs

P = 6
KEYS = 11


def make_gate(kind, n, k, gamma, in_features=P):
    if kind == "comet":
        gate = CometGate(in_features, n, k, gamma=gamma, entropy=0.01)
        nn.init.normal_(gate.split_weight)
    elif kind == "dselect":
        gate = DSelectKGate(in_features, n, k, gamma=gamma, reachability=0.01)
        nn.init.normal_(gate.selector_weight)
    elif kind == "topk":
        gate = TopKGate(in_features, n, k)
    elif kind == "hash":
        gate = HashGate(KEYS, n)
    else:
        gate = SoftmaxGate(in_features, n)
    return gate


def make_experts(kind, n):
    return {
        "dense": lambda: DenseExperts(n, P, 5),
        "feed_forward": lambda: FeedForwardExperts(n, P, 9, 4),
        "mlp": lambda: MLPExperts(n, P, (9, 7, 4)),
        "mlp_tanh": lambda: MLPExperts(n, P, (9, 4), activation="tanh"),
        "modules": lambda: nn.ModuleList(nn.Sequential(nn.Linear(P, 7), nn.Tanh()) for _ in range(n)),
    }[kind]()


def outputs_and_gradients(moe, execution, x, keys, mask=None):
    moe.execution = execution
    moe.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    ys, routings = moe(x, keys=keys, mask=mask)
    loss = sum((t + 1) * y.sin().sum() for t, y in enumerate(ys)) + sum(r.aux_loss for r in routings)
    loss.backward()
    assert {r.execution for r in routings} == {execution}
    gradients = {name: p.grad for name, p in moe.named_parameters()} | {"x": x.grad}
    return gradients | {f"y{t}": y.detach() for t, y in enumerate(ys)}


def assert_same(moe, x, keys=None, mask=None):
    dense = outputs_and_gradients(moe, "dense", x, keys, mask)
    sparse = outputs_and_gradients(moe, "sparse", x, keys, mask)
    for name in dense:
        assert (dense[name] is None) == (sparse[name] is None), name
        if dense[name] is not None:
            scale = max(1.0, float(dense[name].abs().max())) if dense[name].numel() else 1.0
            torch.testing.assert_close(sparse[name], dense[name], atol=1e-11 * scale, rtol=0, msg=name)


@given(
    kinds=st.lists(st.sampled_from(["comet", "dselect", "topk", "hash", "softmax"]), min_size=1, max_size=3),
    experts=st.sampled_from(["dense", "feed_forward", "mlp", "mlp_tanh", "modules"]),
    n=st.integers(1, 40),
    k=st.integers(1, 5),
    gamma=st.sampled_from([1e-3, 1.0, 30.0]),  # hard, mixed and soft paths
    stage=st.sampled_from(["none", "searching", "fixed"]),
    rows=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_dense_and_sparse_agree_in_outputs_and_every_gradient(kinds, experts, n, k, gamma, stage, rows, seed):
    torch.manual_seed(seed)
    gates = [make_gate(kind, n, k, gamma) for kind in kinds]
    if stage != "none":
        search = Permutation(n, steps=1, tau=(0.05, 0.01))
        gates = [PermutedGate(gate, search) for gate in gates]
        if stage == "fixed":
            search.step()
    moe = MultiGateMoE(experts=make_experts(experts, n), gates=gates).double()
    x = torch.randn(rows, P, dtype=torch.float64)
    assert_same(moe, x, torch.randint(KEYS, (rows,)))


@pytest.mark.parametrize("kind", ["comet", "topk"])
def test_convolutional_experts_agree_in_outputs_and_every_gradient(kind):
    experts = ConvExperts(5, (2, 13, 12), filters=(3, 4), kernel_size=3, units=(7, 6))
    gates = [make_gate(kind, 5, 2, 1e-3, in_features=2 * 13 * 12) for _ in range(2)]
    moe = MultiGateMoE(experts=experts, gates=gates).double()
    x = torch.randn(8, 2, 13, 12, dtype=torch.float64)
    routing = moe(x)[1][0]
    assert (routing.selectors is not None) == (kind == "comet")
    assert 0 < (routing.weights == 0).sum() < routing.weights.numel()  # sparse execution skips some
    assert_same(moe, x)


def test_any_modules_over_images():
    experts = ModuleExperts([nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()) for _ in range(4)], input_rank=3)
    moe = MoE(experts=experts, gate=TopKGate(36, 4, 2))
    y, routing = moe(torch.randn(5, 1, 6, 6))
    assert y.shape == (5, 32)
    assert routing.weights.shape == (5, 4)


@pytest.mark.parametrize("execution", ["dense", "sparse"])
def test_tokens_with_padding(execution):
    moe = MoE(experts=DenseExperts(4, P, 3), gate=CometGate(P, 4, k=2, entropy=1.0), execution=execution)
    x = torch.randn(2, 5, P)
    mask = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    y, routing = moe(x, mask=mask)
    assert y.shape == (2, 5, 3)
    assert (y[~mask] == 0).all()
    alone, routing_alone = moe(x[mask])
    torch.testing.assert_close(y[mask], alone)
    torch.testing.assert_close(routing.aux_loss, routing_alone.aux_loss)
    assert routing.statistics()["samples"] == 7


def test_without_the_routing_a_mixture_fits_into_a_sequential():
    moe = MoE(experts=DenseExperts(4, P, 3), gate=TopKGate(P, 4, 2))
    x = torch.randn(5, P)
    y, routing = moe(x)
    assert routing.weights.shape == (5, 4)
    alone = MoE(experts=moe.experts, gate=moe.gate, return_routing=False)
    torch.testing.assert_close(nn.Sequential(alone, nn.ReLU(inplace=True))(x), y.relu())


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(0, keepdim=True)


class Sum(nn.Module):
    def forward(self, x):
        return x.sum(-1)


class Pair(nn.Module):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize("execution", ["dense", "sparse"])
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Mean(), r"expert 2 \(Mean\) must return an output of shape \({rows}, \.\.\.\) .* got \(1, 6\)"),
        (Sum(), r"expert 2 \(Sum\) must return an output of shape \({rows}, \.\.\.\) .* got \({rows},\)"),
        (Pair(), r"expert 2 \(Pair\) must return a tensor, got tuple"),
        (nn.Linear(P, 5), r"same shape per row: expert 0 returned \(6,\), expert 2 \(5,\)"),
    ],
)
def test_an_expert_that_returns_another_shape_is_named(execution, module, message):
    experts = nn.ModuleList([nn.Identity(), nn.Identity(), module, nn.Identity()])
    moe = MoE(experts=experts, gate=HashGate(4, 4), execution=execution)
    moe.gate.assignment.copy_(torch.arange(4))
    rows = 40 if execution == "dense" else 10
    with pytest.raises(ValueError, match=message.format(rows=rows)):
        moe(torch.randn(40, P), keys=torch.arange(40) % 4)


class HalfOfTheRows(DenseExperts):
    def dense(self, x):
        return super().dense(x)[::2]

    def sparse(self, rows, counts):
        return super().sparse(rows, counts)[::2]

    def one(self, rows, expert):
        return super().one(rows, expert)[::2]


@pytest.mark.parametrize("execution", ["dense", "sparse"])
def test_a_stack_that_returns_too_few_rows_is_refused(execution):
    moe = MoE(experts=HalfOfTheRows(4, P, 3), gate=TopKGate(P, 4, 2), execution=execution)
    with pytest.raises(ValueError, match=rf"HalfOfTheRows\.{execution} must return an output of shape"):
        moe(torch.randn(40, P))


def test_a_stack_that_returns_too_few_rows_is_refused_in_a_graph_too():
    routing = Routing(weights=torch.full((40, 4), 0.25))
    message = r"HalfOfTheRows\.one must return an output of shape \(40, \.\.\.\) .* got \(20, 3\)"
    with pytest.raises(ValueError, match=message):
        run_indexed(HalfOfTheRows(4, P, 3), torch.randn(40, P), [routing])


class GateOfOnePair(Gate):
    num_experts = 4

    def __init__(self, row, expert):
        super().__init__()
        self.pair = Pairs(torch.tensor([row]), torch.tensor([expert]), torch.ones(1))

    def forward(self, x, keys=None, mask=None):
        return Routing.from_pairs(self.pair, x.shape[:-1], 4)


@pytest.mark.parametrize("num_gates", [1, 2])
@pytest.mark.parametrize(
    ("row", "expert", "message"),
    [(0, 4, r"experts 0\.\.3, got 4\.\.4"), (5, 0, r"rows 0\.\.4, got 5\.\.5")],
)
def test_pairs_out_of_range_are_refused_for_any_number_of_gates(num_gates, row, expert, message):
    gates = [GateOfOnePair(row, expert) for _ in range(num_gates)]
    moe = MultiGateMoE(experts=DenseExperts(4, P, 3), gates=gates, execution="sparse")
    with pytest.raises(ValueError, match=message):
        moe(torch.randn(5, P))


class GateOfConstantZero(Gate):
    """Expert 0 with weight 1, and expert 1 with weight 0 whose derivative is 1."""

    num_experts = 2

    def __init__(self):
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))

    def forward(self, x, keys=None, mask=None):
        one = x.new_ones(len(x))
        return Routing(weights=torch.stack((one, self.zero * one), -1))


def test_only_dense_execution_gives_a_weight_of_zero_a_gradient_where_it_has_a_derivative():
    moe = MoE(experts=nn.ModuleList([nn.Identity(), nn.Identity()]), gate=GateOfConstantZero())
    x, gradients, outputs = torch.ones(3, P), {}, {}
    for execution in ("dense", "sparse"):
        moe.execution = execution
        moe.zero_grad()
        outputs[execution] = moe(x)[0]
        outputs[execution].sum().backward()
        gradients[execution] = moe.gate.zero.grad.item()
    assert torch.equal(outputs["dense"], outputs["sparse"])
    assert gradients == {"dense": 3 * P, "sparse": 0}


class GateOfOneRow(SoftmaxGate):
    def forward(self, x, keys=None, mask=None):
        return super().forward(x[:1])


@pytest.mark.parametrize("execution", ["auto", "dense", "sparse"])
def test_a_gate_that_returns_too_few_rows_is_refused(execution):
    moe = MoE(experts=DenseExperts(4, P, 3), gate=GateOfOneRow(P, 4), execution=execution)
    with pytest.raises(
        ValueError, match=r"GateOfOneRow must return a routing of shape \(5, 4\), got \(1, 4\)"
    ):
        moe(torch.randn(5, P))


def test_outputs_of_any_rank():
    moe = MoE(
        experts=nn.ModuleList(nn.Sequential(nn.Linear(P, 6), nn.Unflatten(-1, (2, 3))) for _ in range(4)),
        gate=TopKGate(P, 4, 2),
    )
    for execution in ("dense", "sparse"):
        moe.execution = execution
        assert moe(torch.randn(5, P))[0].shape == (5, 2, 3)


class CountingExpert(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(P, 3)
        self.rows = 0

    def forward(self, x):
        self.rows += len(x)
        return self.linear(x)


@pytest.mark.parametrize("training", [True, False])
def test_only_selected_pairs_run_and_each_once(training):
    experts = nn.ModuleList(CountingExpert() for _ in range(8))
    gates = [TopKGate(P, 8, 2) for _ in range(3)]
    moe = MultiGateMoE(experts=experts, gates=gates, execution="sparse").train(training)
    _, routings = moe(torch.randn(20, P))
    union = torch.stack([r.weights != 0 for r in routings]).any(0)
    assert [expert.rows for expert in experts] == union.sum(0).tolist()


@pytest.mark.parametrize("kind", ["dense", "modules"])
def test_an_expert_without_samples_has_a_zero_gradient_so_adam_takes_the_same_steps(kind):
    def trained(execution):
        torch.manual_seed(0)
        moe = MoE(experts=make_experts(kind, 6), gate=TopKGate(P, 6, 1), execution=execution).double()
        optimizer = torch.optim.Adam(moe.parameters(), 0.1)
        for _ in range(5):
            y, _ = moe(torch.randn(2, P, dtype=torch.float64))
            optimizer.zero_grad()
            y.square().sum().backward()
            assert all(p.grad is not None for p in moe.experts.parameters())
            optimizer.step()
        return moe.state_dict()

    dense, sparse = trained("dense"), trained("sparse")
    for name in dense:
        torch.testing.assert_close(sparse[name], dense[name], atol=1e-12, rtol=0)


def test_auto_turns_sparse_as_the_gate_hardens_and_back():
    moe = MoE(experts=DenseExperts(8, P, 3), gate=CometGate(P, 8, k=2, gamma=1.0))
    x = torch.randn(50, P)
    assert moe(x)[1].statistics()["execution"] == "dense"
    with torch.no_grad():
        moe.gate.split_weight.mul_(1e5)
    assert moe(x)[1].statistics()["execution"] == "sparse"
    with torch.no_grad():
        moe.gate.split_weight.mul_(1e-5)
    assert moe(x)[1].statistics()["execution"] == "dense"


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh", "identity", "swiglu"])
def test_experts_of_every_activation_agree_and_can_be_copied(activation):
    experts = [FeedForwardExperts(4, P, 6, 3, activation=activation)]
    if activation != "swiglu":
        experts.append(DenseExperts(4, P, 3, activation=activation))
    for stack in experts:
        moe = pickle.loads(pickle.dumps(MultiGateMoE(experts=stack, gates=[TopKGate(P, 4, 2)]))).double()
        assert_same(moe, torch.randn(7, P, dtype=torch.float64))


def test_swiglu_gates_one_half_of_its_layer_with_the_other():
    experts = FeedForwardExperts(1, P, 6, 3, activation="swiglu").double()
    x = torch.randn(5, P, dtype=torch.float64)
    a, b = (x @ experts.inner.weight[0].t()).chunk(2, -1)
    wanted = (nn.functional.silu(a) * b) @ experts.outer.weight[0].t()
    torch.testing.assert_close(experts.dense(x).squeeze(1), wanted)


def test_autocast_leaves_float64_alone_in_both_executions():
    moe = MultiGateMoE(experts=DenseExperts(4, P, 3), gates=[TopKGate(P, 4, 2)]).double()
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(moe, torch.randn(7, P, dtype=torch.float64))


def test_autocast_trains():
    moe = MoE(experts=FeedForwardExperts(4, P, 8), gate=CometGate(P, 4, k=2))
    for execution in ("dense", "sparse"):
        moe.execution = execution
        with torch.autocast("cpu", torch.bfloat16):
            y, routing = moe(torch.randn(5, P))
        assert y.dtype == torch.bfloat16
        assert routing.weights.dtype == torch.float32
        y.float().sum().backward()
        assert torch.isfinite(moe.experts.inner.weight.grad).all()


@pytest.mark.parametrize("execution", ["dense", "sparse"])
def test_shared_experts_are_added_for_every_row_but_padding(execution):
    torch.manual_seed(0)
    shared, x = torch.nn.Linear(8, 5), torch.randn(4, 8)
    mask = torch.tensor([True, True, False, True])
    moe = MoE(experts=DenseExperts(6, 8, 5), gate=TopKGate(8, 6, k=2), shared=shared, execution=execution)
    y, routing = moe(x, mask=mask)
    moe.shared = None
    routed, alone = moe(x, mask=mask)
    torch.testing.assert_close(y[mask], (routed + shared(x))[mask])
    assert y[2].count_nonzero() == 0
    without = moe.flops([alone])
    moe.shared = shared
    assert moe.flops([routing]) == without + 4 * 2 * 8 * 5


def test_a_shared_expert_that_is_infinite_for_padding_leaves_its_output_zero():
    class Reciprocal(nn.Module):
        def forward(self, x):
            return 1 / x

    x, mask = torch.ones(3, 8), torch.tensor([True, False, True])
    x[1] = 0
    moe = MoE(experts=DenseExperts(6, 8, 8), gate=TopKGate(8, 6, k=2), shared=Reciprocal())
    assert moe(x, mask=mask)[0][1].count_nonzero() == 0


def test_a_layer_that_is_wrapped_is_run():
    class Doubled(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def shared(self, x):
            return 2 * self.layer.shared(x)

    experts, x = MLPExperts(3, P, (9, 4), activation="identity"), torch.randn(5, P)
    plain = experts.dense(x)
    experts.layers[0] = Doubled(experts.layers[0])
    torch.testing.assert_close(experts.dense(x), 2 * plain)
