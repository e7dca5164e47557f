"""NeuronExperts: every execution equals the dense definition, and a step reads only the selected rows."""

import pytest
import torch
from torch import nn

from comet_moe import MoE, MultiGateMoE, Routing
from comet_moe.experts import NeuronExperts
from comet_moe.gates import Gate, HashGate, SoftmaxGate, TopKGate
from comet_moe.gates.joint import JointSelection
from comet_moe.kernels import jit
from comet_moe.routing import Pairs

P, N, U, WIDTH = 5, 7, 4, 3
PATHS = ("compiled", "torch")


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Both ways to compute, whatever the work is."""
    monkeypatch.setattr(jit, "SMALL_WORK", 0 if request.param == "compiled" else float("inf"))


class SlotGate(Gate):
    """A router over the first three experts that returns slots; the second slot is not always used."""

    def __init__(self):
        super().__init__()
        self.num_experts = N
        self.router = nn.Linear(P, 3)

    def forward(self, x, keys=None, mask=None):
        weight, expert = self.router(x).softmax(-1).reshape(-1, 3).topk(2)
        weight = torch.stack((weight[:, 0], weight[:, 1] * (weight[:, 1] > 0.3)), -1)
        return Routing.from_slots(expert, weight, x.shape[:-1], N)


def expected(experts, x, weights):
    """The definition, one expert at a time: (B, p), (B, n) -> (B, u)."""
    act = {"gelu": nn.functional.gelu, "relu": torch.relu, "tanh": torch.tanh}[experts.activation]
    rows = [act(x @ inner.T) @ outer for inner, outer in zip(experts.inner, experts.outer, strict=True)]
    return sum(weights[:, i : i + 1] * rows[i] for i in range(N))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("execution", ["auto", "dense", "sparse"])
@pytest.mark.parametrize("activation", ["gelu", "relu", "tanh"])
@pytest.mark.parametrize("kind", ["topk", "softmax", "slots"])
def test_every_execution_equals_the_definition_in_outputs_and_gradients(execution, activation, kind):
    gate = {"topk": lambda: TopKGate(P, N, k=2), "softmax": lambda: SoftmaxGate(P, N), "slots": SlotGate}[
        kind
    ]()
    experts = NeuronExperts(num_experts=N, in_features=P, out_features=U, width=WIDTH, activation=activation)
    moe = MoE(experts=experts, gate=gate, execution=execution).double()
    x = torch.randn(6, P, dtype=torch.float64, requires_grad=True)
    y, routing = moe(x)
    if execution != "auto":
        assert routing.execution == execution
    wanted = expected(experts, x, routing.weights)
    torch.testing.assert_close(y, wanted)
    inputs = [x, *moe.parameters()]
    for got, of in zip(
        torch.autograd.grad(y.square().sum(), inputs, retain_graph=True),
        torch.autograd.grad(wanted.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, of)


@pytest.mark.usefixtures("path")
def test_several_gates_over_one_pool_equal_their_own_mixtures():
    experts = NeuronExperts(num_experts=N, in_features=P, out_features=U, width=WIDTH)
    gates = [SlotGate(), TopKGate(P, N, k=2), SlotGate()]
    together = MultiGateMoE(experts=experts, gates=gates, execution="sparse").double()
    x = torch.randn(6, P, dtype=torch.float64)
    ys, routings = together(x)
    for y, gate in zip(ys, gates, strict=True):
        torch.testing.assert_close(y, MoE(experts=experts, gate=gate)(x)[0])
    union = torch.stack([routing.weights for routing in routings]).any(0)
    assert routings[0].expert_rows == int(union.sum())


@pytest.mark.usefixtures("path")
def test_gradients_and_second_derivatives_are_those_of_finite_differences():
    moe = MoE(experts=NeuronExperts(N, P, U, WIDTH), gate=SlotGate(), execution="sparse").double()
    inputs = [torch.randn(3, P, dtype=torch.float64, requires_grad=True), *moe.experts.parameters()]

    def output(x, inner, outer):
        return torch.func.functional_call(moe, {"experts.inner": inner, "experts.outer": outer}, (x,))[0]

    assert torch.autograd.gradcheck(output, inputs)
    assert torch.autograd.gradgradcheck(output, inputs)


def test_experts_without_a_sample_have_a_zero_gradient_or_no_row_of_it():
    x, keys = torch.randn(4, P), torch.tensor([0, 1, 1, 0])
    for sparse in (False, True):
        experts = NeuronExperts(N, P, U, sparse=sparse)
        gate = HashGate(2, N)
        y, _ = MoE(experts=experts, gate=gate, execution="sparse")(x, keys=keys)
        y.sum().backward()
        used = gate.assignment.unique()
        for parameter in (experts.inner, experts.outer):
            gradient = parameter.grad
            if sparse:
                assert gradient._indices()[0].tolist() == used.tolist()
                gradient = gradient.to_dense()
            is_idle = torch.ones(N, dtype=torch.bool)
            is_idle[used] = False
            assert (gradient[is_idle] == 0).all()
            assert (gradient[used] != 0).any()


def test_a_step_of_sparse_adam_moves_the_selected_experts_as_adam_does_and_no_other():
    x, keys = torch.randn(4, P), torch.arange(4)
    results = []
    for sparse, optimiser in ((False, torch.optim.Adam), (True, torch.optim.SparseAdam)):
        torch.manual_seed(1)
        experts = NeuronExperts(40, P, U, sparse=sparse)
        before = experts.inner.detach().clone()
        gate = HashGate(4, 40)
        steps = optimiser(experts.parameters(), lr=0.1)
        for _ in range(2):  # the same rows in each step
            steps.zero_grad()
            MoE(experts=experts, gate=gate)(x, keys=keys)[0].square().sum().mul(1e4).backward()
            steps.step()
        has_moved = (experts.inner != before).flatten(1).any(1)
        assert has_moved.nonzero().flatten().tolist() == gate.assignment.unique().tolist()
        results.append(experts.inner.detach())
    # SparseAdam adds eps = 1e-8 before the correction of the bias, Adam after it: gradients are large here.
    torch.testing.assert_close(*results, atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.usefixtures("path")
def test_batches_of_none_and_one_run_forward_and_backward(batch, sparse):
    experts = NeuronExperts(N, P, U, sparse=sparse)
    x = torch.randn(batch, P, requires_grad=True)
    y, _ = MoE(experts=experts, gate=SlotGate(), execution="sparse")(x)
    assert y.shape == (batch, U)
    y.sum().backward()
    assert experts.inner.grad.shape == (N, 1, P)
    assert x.grad.shape == x.shape


@pytest.mark.usefixtures("path")
def test_rows_that_are_all_masked_give_zeros():
    experts = NeuronExperts(N, P, U)
    y, _ = MoE(experts=experts, gate=SlotGate())(
        torch.randn(2, 3, P), mask=torch.zeros(2, 3, dtype=torch.bool)
    )
    assert (y == 0).all()
    y.sum().backward()
    assert (experts.inner.grad == 0).all()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("execution", ["dense", "sparse"])
def test_bfloat16_storage_and_autocast_compute_in_float32(execution):
    experts = NeuronExperts(N, P, U, WIDTH, dtype=torch.bfloat16)
    assert experts.inner.dtype == experts.outer.dtype == torch.bfloat16
    gate, x = SlotGate(), torch.randn(6, P)
    moe = MoE(experts=experts, gate=gate, execution=execution)
    y, routing = moe(x)
    widened = NeuronExperts(N, P, U, WIDTH)
    widened.load_state_dict(experts.state_dict())
    wanted = expected(widened, x, routing.weights)
    # float32 sums of at most 2 · 3 · 5 terms of size 1, in two orders. Of bfloat16 input, dense execution
    # rounds the outputs of the experts, which are below 1, and their weighted sum.
    torch.testing.assert_close(y, wanted, atol=1e-5, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(moe(x)[0], wanted, atol=1e-5, rtol=0)
    narrow = x.bfloat16()
    again = expected(widened, narrow.float(), gate(narrow.float()).weights)
    got = moe(narrow)[0]
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), again, atol=2**-8, rtol=0)
    y.square().sum().backward()
    assert experts.inner.grad.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
def test_graphs_run_the_slots_of_a_gate_and_agree_with_eager_mode(fullgraph):
    torch._dynamo.reset()
    experts = NeuronExperts(64, P, U, sparse=not fullgraph)
    moe = MoE(experts=experts, gate=HashGate(9, 64), return_routing=False)
    x, keys = torch.randn(6, P), torch.arange(6)
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=fullgraph)
    y = compiled(x, keys=keys)
    torch.testing.assert_close(y, moe(x, keys=keys))
    y.square().sum().backward()
    gradient = experts.inner.grad
    assert gradient.is_sparse is not fullgraph  # in graphs no gradient is sparse, so the experts leave it
    experts.inner.grad = None
    moe(x, keys=keys).square().sum().backward()
    torch.testing.assert_close(gradient.to_dense(), experts.inner.grad.to_dense())


def test_gradients_of_each_sample_are_those_of_vmap():
    moe = MoE(experts=NeuronExperts(N, P, U), gate=SoftmaxGate(P, N), execution="dense", return_routing=False)
    weights, x = dict(moe.named_parameters()), torch.randn(4, P)

    def loss(weights, row):
        return torch.func.functional_call(moe, weights, (row[None],)).square().sum()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    for name, gradient in together.items():
        alone = [torch.func.grad(loss)(weights, row)[name] for row in x]
        torch.testing.assert_close(gradient, torch.stack(alone))


def test_sizes_and_inputs_that_cannot_run_are_refused():
    with pytest.raises(ValueError, match="num_experts must be an integer of at least 1, got 0"):
        NeuronExperts(0, P, U)
    with pytest.raises(ValueError, match=r"width must be an integer of at least 1, got 1\.5"):
        NeuronExperts(N, P, U, width=1.5)
    with pytest.raises(ValueError, match=r"activation must be one of relu, gelu, .* got 'swish'"):
        NeuronExperts(N, P, U, activation="swish")
    with pytest.raises(
        ValueError, match=r"would need 4,398\.0 GB of memory, .* choose fewer experts, a small"
    ):
        NeuronExperts(2**24, 2**15, 2**15)
    with pytest.raises(ValueError, match=r"compute in torch\.float32, their input is torch\.float64"):
        NeuronExperts(N, P, U).dense(torch.randn(2, P, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"rows must have shape \(B, 5\), got \(2, 6\)"):
        MoE(experts=NeuronExperts(N, P, U), gate=HashGate(2, N))(torch.randn(2, 6), keys=torch.tensor([0, 1]))
    outside = Pairs(torch.tensor([0]), torch.tensor([N]), torch.ones(1))

    class Wrong(SlotGate):
        def forward(self, x, keys=None, mask=None):
            return Routing.from_pairs(outside, x.shape[:-1], N)

    with pytest.raises(ValueError, match=r"must name experts 0\.\.6, got 7"):
        MoE(experts=NeuronExperts(N, P, U), gate=Wrong(), execution="sparse")(torch.randn(1, P))


def test_a_joint_choice_of_two_tasks_runs():
    moe = MultiGateMoE(
        experts=NeuronExperts(N, P, U),
        gates=[SoftmaxGate(P, N), SoftmaxGate(P, N)],
        joint=JointSelection(k_shared=2),
    )
    ys, routings = moe(torch.randn(4, P))
    assert routings[0].expert_rows == 8
    assert ys[0].shape == (4, U)
