"""Sparse execution for accelerators and graphs: the host reads nothing, and results are those of the CPU.

``FakeTensorMode`` raises wherever a value is read, so it stands for the accelerator.
"""

import pytest
import torch
from all_gates import GATES, N, P, keys_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from comet_moe import MoE, MultiGateMoE
from comet_moe.experts import ConvExperts, DenseExperts, FeedForwardExperts, MLPExperts
from comet_moe.gates import CometGate, TopKGate
from comet_moe.mixture import static_dispatch
from comet_moe.mixture.static_dispatch import run_static

EXPERTS = {
    "dense": lambda: DenseExperts(N, P, 5),
    "mlp": lambda: MLPExperts(N, P, (9, 4), activation="tanh"),
    "feed_forward": lambda: FeedForwardExperts(N, P, 7, activation="swiglu"),
    "conv": lambda: ConvExperts(N, (3, 2, 2), filters=(4,), kernel_size=1, units=(5,)),
}
BOUNDED = {"topk", "topk-noise", "topk-all", "quantile", "sigmoid", "hash"}
"""Gates that know beforehand how many experts they choose."""


def make_moe(gate, experts="dense", execution="auto"):
    moe = MultiGateMoE(experts=EXPERTS[experts](), gates=[gate(), gate()], execution=execution)
    for module in moe.gates:
        if isinstance(module, CometGate):
            nn.init.normal_(module.split_weight)  # hard paths, so that some experts are left out
    return moe


def inputs_of(experts, rows=20):
    x = torch.randn(rows, P)
    return x.unflatten(1, (3, 2, 2)) if experts == "conv" else x


def run(moe, x, precision=None):
    moe.zero_grad()
    x = x.clone().requires_grad_()
    keys = torch.arange(len(x)) % 9
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is not None):
        ys, routings = moe(x, keys=keys)
    sum((y.float() * (t + 1)).sin().sum() for t, y in enumerate(ys)).backward()
    grads = {name: p.grad for name, p in moe.named_parameters() if p.grad is not None}
    return {"y": torch.stack(ys).detach(), "x": x.grad, **grads}, routings


@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize("name", [name for name in GATES if name != "topk-noise"])
def test_outputs_and_gradients_are_those_of_the_compiled_loops(name, precision, monkeypatch):
    moe = make_moe(GATES[name], execution="sparse")
    x = inputs_of("dense")
    wanted, _ = run(moe, x, precision)
    monkeypatch.setattr("comet_moe.mixture.dispatch.counts_are_known", lambda x: False)
    got, routings = run(moe, x, precision)
    assert routings[0].execution == "sparse"
    assert got.keys() == wanted.keys()
    # In bfloat16 an output, a gradient and a weight are rounded to 2**-8 each.
    tolerance = 1e-5 if precision is None else 3 * 2.0**-8
    for key, value in wanted.items():
        scale = max(1.0, float(value.float().abs().max()))
        torch.testing.assert_close(got[key], value, atol=tolerance * scale, rtol=0, msg=key)


@pytest.mark.parametrize("experts", EXPERTS)
def test_all_stacks_agree_with_their_compiled_loops(experts, monkeypatch):
    moe = make_moe(lambda: TopKGate(P, N, k=2), experts, "sparse")
    x = inputs_of(experts)
    wanted, before = run(moe, x)
    monkeypatch.setattr("comet_moe.mixture.dispatch.counts_are_known", lambda x: False)
    got, routings = run(moe, x)
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, atol=1e-5, rtol=1e-5, msg=key)
    assert int(routings[0].expert_rows) == before[0].expert_rows
    assert moe.flops(routings) == moe.flops(before)


def test_rows_of_no_expert_leave_no_trace(monkeypatch):
    """What ``grouped_mm`` does not write may be NaN; it must reach no output and no gradient."""
    empty = torch.nn.functional.grouped_mm

    def with_nan(*arguments, **options):
        product = empty(*arguments, **options)
        if product.dim() == 3:  # the gradient of the weights
            return product
        rows = torch.arange(len(product)).unsqueeze(-1)
        return torch.where(rows < options["offs"][-1], product, torch.nan)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", with_nan)
    monkeypatch.setattr("comet_moe.mixture.dispatch.counts_are_known", lambda x: False)
    got, _ = run(make_moe(GATES["comet"], "mlp", "sparse"), inputs_of("mlp"))
    assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("execution", ["dense", "sparse", "auto"])
@pytest.mark.parametrize("name", GATES)
def test_forward_and_backward_read_no_values(name, execution):
    with FakeTensorMode():
        moe = make_moe(GATES[name], execution=execution)
        x = torch.randn(20, P, requires_grad=True)
        ys, routings = moe(x, keys=keys_of(x))
        sum(y.sum() for y in ys).backward()
        assert x.grad.shape == x.shape
    slots = static_dispatch.count_slots(routings)
    assert (slots < N) == (name in BOUNDED)
    expected = "sparse" if slots <= N / 2 else "dense"
    assert routings[0].execution == (expected if execution == "auto" else execution)


@pytest.mark.parametrize("experts", EXPERTS)
def test_every_stack_reads_no_values(experts):
    with FakeTensorMode():
        moe = make_moe(GATES["topk"], experts, "sparse")
        ys, _ = moe(inputs_of(experts))
        sum(y.sum() for y in ys).backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "execution"),
    [
        *(
            (name, "auto")
            for name in ("topk", "comet", "hash", "softmax", "relu", "dselect", "expert-choice")
        ),
        *((name, execution) for name in ("topk", "comet") for execution in ("dense", "sparse")),
    ],
)
def test_compiled_equals_eager_and_says_what_ran(name, execution):
    torch._dynamo.reset()
    moe = MoE(experts=DenseExperts(N, P, 5), gate=GATES[name](), execution=execution)
    x, keys = torch.randn(20, P), torch.arange(20) % 9

    def loss_of(x):
        y, routing = moe(x, keys=keys)
        return y, routing.execution

    def outcome(function):
        moe.zero_grad()
        y, ran = function(x)
        y.sin().sum().backward()
        return y.detach(), ran, {key: p.grad for key, p in moe.named_parameters() if p.grad is not None}

    y, ran, grads = outcome(torch.compile(loss_of, backend="aot_eager", fullgraph=True))
    plain_y, _, plain_grads = outcome(loss_of)
    bounded = name in BOUNDED
    assert ran == (("sparse" if bounded else "dense") if execution == "auto" else execution)
    torch.testing.assert_close(y, plain_y, atol=1e-5, rtol=0)
    assert grads.keys() == plain_grads.keys()
    for key, value in plain_grads.items():
        torch.testing.assert_close(grads[key], value, atol=1e-5, rtol=1e-5, msg=key)


def test_two_calls_give_the_same_bits():
    moe = make_moe(GATES["topk"])
    x = inputs_of("dense")
    with torch.no_grad():
        routings = [gate(x) for gate in moe.gates]
        first, second = (run_static(moe.experts, x, routings)[0] for _ in range(2))
    assert torch.equal(first, second)


DEVICES = [name for name in ("cuda", "mps") if getattr(torch, name).is_available()]


@pytest.mark.skipif(not DEVICES, reason="this machine has neither CUDA nor MPS")
@pytest.mark.parametrize("execution", ["dense", "sparse"])
@pytest.mark.parametrize("name", [name for name in GATES if name != "topk-noise"])
def test_an_accelerator_agrees_with_the_cpu_and_never_waits(name, execution):
    device = DEVICES[0]
    moe = make_moe(GATES[name], execution=execution)
    x, keys = torch.randn(20, P), torch.arange(20) % 9
    wanted = torch.stack(moe(x, keys=keys)[0])
    moe, x, keys = moe.to(device), x.to(device), keys.to(device)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        ys, _ = moe(x, keys=keys)
        sum(y.sum() for y in ys).backward()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(torch.stack(ys).cpu(), wanted, atol=1e-4, rtol=0)


def test_slots_are_those_that_the_gates_can_fill():
    moe = make_moe(GATES["topk"])
    routings = [gate(inputs_of("dense")) for gate in moe.gates]
    assert static_dispatch.count_slots(routings) == 4
    assert static_dispatch.count_slots(routings[:1]) == 2
    comet = [gate(inputs_of("dense")) for gate in make_moe(GATES["comet"]).gates]
    assert static_dispatch.count_slots(comet) == N
