"""Compiled loops over bfloat16: the same bits as torch's conversions, the same sums as the torch versions."""

import pytest
import torch
from torch import nn

from comet_moe import MultiGateMoE
from comet_moe.experts import DenseExperts, FeedForwardExperts
from comet_moe.gates import CometGate, TopKGate
from comet_moe.kernels.mix import Epilogue, PairLayout, gather_rows, mix, mix_dense, mix_torch
from comet_moe.kernels.plan import plan_from_weights

ROUNDING = 2.0**-8
"""Half a unit in the last place of bfloat16, relative to a number: what one rounding may change."""


def one_pair_per_row(rows):
    return PairLayout(torch.arange(rows), torch.arange(rows + 1))


def test_every_bfloat16_passes_unchanged():
    z = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).unsqueeze(1)
    out = mix(z, torch.ones(2**16, 1), one_pair_per_row(2**16), Epilogue()).squeeze(1)
    torch.testing.assert_close(out, z, rtol=0, atol=0, equal_nan=True)


def test_sums_are_rounded_as_torch_rounds():
    # Halves of units in the last place, one below and one above them, the largest float32, denormal numbers.
    bits = torch.arange(2**16, dtype=torch.int64) << 16
    near = torch.cat([bits + low for low in (0x7FFF, 0x8000, 0x8001)]).to(torch.int32).view(torch.float32)
    z = torch.ones(len(near), 1, dtype=torch.bfloat16)
    out = mix(z, near.unsqueeze(1), one_pair_per_row(len(near)), Epilogue()).flatten()
    torch.testing.assert_close(out, near.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


def gradients(function, z, weights):
    z, weights = z.clone().requires_grad_(), weights.clone().requires_grad_()
    out = function(z, weights)
    (out.float() * torch.arange(out.numel()).reshape(out.shape).sin()).sum().backward()
    return out.detach(), z.grad, weights.grad


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("tasks", [1, 3])
def test_mixing_agrees_with_torch(relu, tasks):
    rows, n, u, epilogue = 20, 6, 37, Epilogue(relu=relu)
    plan = plan_from_weights([torch.rand(rows, n) * (torch.rand(rows, n) < 0.4) for _ in range(tasks)])
    z = torch.randn(len(plan.row_sample), u).bfloat16()
    fast = gradients(lambda z, w: mix(z, w, plan.layout, epilogue), z, plan.weights)
    plain = gradients(lambda z, w: mix_torch(z, w, plan.layout, epilogue), z, plan.weights)
    dense_z, dense_weights = torch.randn(rows, n, u).bfloat16(), torch.rand(rows, tasks, n)
    fast += gradients(lambda z, w: mix_dense(z, w, epilogue), dense_z, dense_weights)
    plain += gradients(
        lambda z, w: torch.bmm(w, (z.relu() if relu else z).float()).bfloat16(), dense_z, dense_weights
    )
    for got, wanted in zip(fast, plain, strict=True):
        assert got.dtype == wanted.dtype
        scale = float(wanted.float().abs().max())
        torch.testing.assert_close(got, wanted, rtol=2 * ROUNDING, atol=1e-6 * scale)


def test_gathering_sums_its_gradient_in_float32():
    # 256 pairs of one sample: a sum in bfloat16 would stay at 256 from there on.
    layout = PairLayout(torch.arange(512), torch.tensor([0, 512]))
    x = torch.zeros(1, 3, dtype=torch.bfloat16, requires_grad=True)
    gather_rows(x, torch.zeros(512, dtype=torch.int64), layout).sum().backward()
    assert torch.equal(x.grad, torch.full((1, 3), 512, dtype=torch.bfloat16))


@pytest.mark.parametrize("dropout", [0.5, 0.3])
def test_dropout_drops_the_same_in_both_passes(dropout):
    z = torch.ones(50, 70, dtype=torch.bfloat16, requires_grad=True)
    out = mix(z, torch.ones(50, 1), one_pair_per_row(50), Epilogue(dropout=dropout)).squeeze(1)
    out.sum().backward()
    assert torch.equal(z.grad, out.detach())
    assert 0 < (out == 0).sum() < out.numel()


@pytest.mark.parametrize("make_experts", [DenseExperts, FeedForwardExperts])
def test_under_autocast_both_executions_agree_with_float32(make_experts):
    gates = [CometGate(16, 8, k=2, gamma=1e-3), TopKGate(16, 8, k=2)]
    nn.init.normal_(gates[0].split_weight)
    moe, x = MultiGateMoE(experts=make_experts(8, 16, 32), gates=gates), torch.randn(40, 16)

    def run(execution, autocast):
        moe.execution = execution
        moe.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            ys, routings = moe(x)
        assert {y.dtype for y in ys} == {torch.bfloat16 if autocast else torch.float32}
        assert {routing.weights.dtype for routing in routings} == {torch.float32}
        sum(y.float().square().mean() for y in ys).backward()
        return {name: p.grad for name, p in moe.named_parameters()} | {"y": torch.stack(ys).detach().float()}

    wanted = run("dense", autocast=False)
    for execution in ("dense", "sparse"):
        for name, value in run(execution, autocast=True).items():
            # Two layers forward and backward, each with inputs, weights and outputs rounded.
            scale = float(wanted[name].abs().max())
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=8 * ROUNDING * scale, msg=name)
