"""Mixtures of neurons in one pass equal their definition, and refuse what the loop may not read."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comet_moe import MoE
from comet_moe.experts import NeuronExperts
from comet_moe.gates import CometGate, ProductKeyGate, SoftmaxGate
from comet_moe.kernels import jit
from comet_moe.kernels.neurons import ACTIVATIONS, mix_neurons, mix_neurons_torch

P, U, N, WIDTH = 5, 3, 7, 2


@pytest.fixture(autouse=True)
def _compiled_at_any_size(monkeypatch):
    monkeypatch.setattr(jit, "SMALL_WORK", 0)


def operands(rows=6, slots=4, dtype=torch.float64, stored=None, seed=0):
    torch.manual_seed(seed)
    stored = stored or dtype
    tables = (
        torch.randn(N, WIDTH, P, dtype=dtype).to(stored),
        torch.randn(N, WIDTH, U, dtype=dtype).to(stored),
    )
    expert, weight = torch.randint(N, (rows, slots)), torch.randn(rows, slots, dtype=dtype)
    return torch.randn(rows, P, dtype=dtype), *tables, expert, weight * (torch.rand(rows, slots) < 0.7)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@given(rows=st.integers(0, 5), slots=st.integers(0, 4), seed=st.integers(0, 99))
def test_one_pass_equals_the_definition(activation, rows, slots, seed):
    given_operands = operands(rows, slots, seed=seed)
    torch.testing.assert_close(
        mix_neurons(*given_operands, activation), mix_neurons_torch(*given_operands, activation)
    )


def test_bfloat16_tables_are_widened():
    given_operands = operands(dtype=torch.float32, stored=torch.bfloat16)
    found, wanted = mix_neurons(*given_operands, "gelu"), mix_neurons_torch(*given_operands, "gelu")
    torch.testing.assert_close(found, wanted)


def test_threads_compute_what_one_thread_does(monkeypatch):
    one = mix_neurons(*operands(40), "tanh")
    monkeypatch.setattr("comet_moe.kernels.neurons.count_threads", lambda rows, work: min(3, rows))
    assert torch.equal(one, mix_neurons(*operands(40), "tanh"))


@pytest.mark.parametrize("wrong", [-1, N])
def test_a_used_slot_must_name_an_expert_and_an_unused_one_need_not(wrong):
    x, inner, outer, expert, weight = operands()
    expert[2, 1], weight[2, 1] = wrong, 0.0
    used = mix_neurons(x, inner, outer, expert, weight, "relu")
    assert torch.isfinite(used).all()
    weight[2, 1] = 1.0
    with pytest.raises(ValueError, match=rf"must name experts 0\.\.6, got {wrong}"):
        mix_neurons(x, inner, outer, expert, weight, "relu")


def test_shapes_that_do_not_fit_are_refused():
    x, inner, outer, expert, weight = operands()
    with pytest.raises(ValueError, match="do not fit, got shapes"):
        mix_neurons(x[:, 1:], inner, outer, expert, weight, "relu")


def test_nan_is_not_hidden():
    for activation in ACTIVATIONS:
        x, *others = operands()
        others[-1].fill_(1.0)
        x[1, 2] = float("nan")
        assert mix_neurons(x, *others, activation).isnan().any(1).tolist() == [False, True, *[False] * 4]


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
@pytest.mark.parametrize("execution", ["auto", "sparse", "dense"])
@pytest.mark.parametrize(
    "gate", [CometGate(P, 64, 2, 1e-4, scale=1.5), ProductKeyGate(P, 64, 3, 2), SoftmaxGate(P, 64)]
)
def test_a_mixture_without_gradients_equals_the_one_with_them(gate, execution, shape):
    moe = MoE(experts=NeuronExperts(64, P, U, WIDTH), gate=gate, execution=execution).eval()
    x, mask = torch.randn(*shape, P), torch.arange(6).reshape(shape) != 1
    wanted, routing = moe(x, mask=mask)
    with torch.no_grad():
        found, again = moe(x, mask=mask)
    torch.testing.assert_close(found, wanted.detach(), atol=1e-6, rtol=1e-5)
    if again.execution == routing.execution:
        assert int(again.expert_rows) == int(routing.expert_rows)
