"""torch.export holds every gate over features, at any batch size; mixtures compile in training, too."""

import pytest
import torch
from all_gates import GATES, N, P, keys_of
from torch import nn

import comet_moe
from comet_moe import MoE, Permutation, PermutedGate
from comet_moe.experts import DenseExperts

STEPPED = ["sigmoid", "relu", "expert-choice"]


class Weights(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def forward(self, x):
        return self.gate(x, keys=keys_of(x)).weights


def fixed_search():
    search = Permutation(N, steps=1)
    search.step()
    return search


@pytest.mark.slow
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("permuted", [False, True])
def test_gates_export_with_a_dynamic_batch(name, permuted):
    gate = GATES[name]()
    gate(torch.randn(30, P), keys=keys_of(torch.randn(30, P)))
    gate = PermutedGate(gate, fixed_search()) if permuted else gate
    module, x = Weights(gate).eval(), torch.randn(7, P)
    batch = torch.export.Dim("batch", min=2, max=1000)
    program = torch.export.export(module, (x,), dynamic_shapes={"x": {0: batch}})
    for rows in (7, 20):
        x = torch.randn(rows, P)
        torch.testing.assert_close(program.module()(x), module(x), atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPPED)
def test_a_compiled_mixture_trains_and_steps_as_the_plain_one(name):
    def train(compiled):
        torch.manual_seed(0)
        moe = MoE(experts=DenseExperts(N, P, 3), gate=GATES[name]())

        def loss_of(x):
            y, routing = moe(x)
            return y.square().mean() + routing.aux_loss

        torch._dynamo.reset()
        loss = torch.compile(loss_of, backend="aot_eager", fullgraph=True) if compiled else loss_of
        for _ in range(3):
            loss(torch.randn(20, P)).backward()
            comet_moe.step(moe)
        return dict(moe.named_buffers()) | {key: value.grad for key, value in moe.named_parameters()}

    got, wanted = train(compiled=True), train(compiled=False)
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, msg=lambda text, key=key: f"{key}: {text}")
