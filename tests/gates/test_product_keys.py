"""ProductKeyGate: the best cells of the whole table, pooled heads, batch normalisation, padding."""

import pytest
import torch
from gate_laws import COMPILED, check_laws
from hypothesis import given
from hypothesis import strategies as st

from comet_moe import MoE
from comet_moe.experts import NeuronExperts
from comet_moe.gates import ProductKeyGate

P = 5


def plain_weights(gate, x):
    """The definition: nn.BatchNorm1d, every cell of the table scored, the best k of each head."""
    n, heads, half = gate.num_experts, gate.heads, gate.query_features // 2
    norm = torch.nn.BatchNorm1d(heads * 2 * half).to(x.dtype).train(gate.training)
    norm.load_state_dict(
        {
            "weight": gate.norm_weight,
            "bias": gate.norm_bias,
            "running_mean": gate.running_mean,
            "running_var": gate.running_var,
        },
        strict=False,
    )
    queries = norm(x @ gate.query.t())
    weights = torch.zeros(len(x), n, dtype=x.dtype)
    for head in range(heads):
        first, second = queries[:, 2 * half * head : 2 * half * (head + 1)].split(half, 1)
        cells = (first @ gate.row_keys.t()).unsqueeze(2) + (second @ gate.column_keys.t()).unsqueeze(1)
        score, expert = cells.flatten(1)[:, :n].topk(gate.k_per_head)
        weights = weights.scatter_add(1, expert, score.softmax(1) * gate.scale / heads)
    return weights


def made_gate(n, k=2, heads=2, **settings):
    gate = ProductKeyGate(P, n, k=k, heads=heads, query_features=6, **settings).double()
    for value in (gate.norm_weight, gate.norm_bias, gate.running_mean, gate.running_var):
        torch.nn.init.uniform_(value, 0.5, 1.5)
    return gate


@given(n=st.integers(1, 40), k=st.integers(1, 9), heads=st.integers(1, 3), training=st.booleans())
def test_weights_are_those_of_the_best_cells_of_the_whole_table(n, k, heads, training):
    gate, x = made_gate(n, k, heads).train(training), torch.randn(7, P, dtype=torch.float64)
    wanted = plain_weights(gate, x)
    routing = gate(x)
    assert routing.in_pairs
    torch.testing.assert_close(routing.weights, wanted)
    assert int((routing.weights != 0).sum(1).max()) <= gate.k == min(n, min(n, k) * heads)


def test_gradients_are_those_of_the_plain_implementation():
    gate, x = made_gate(23, k=3), torch.randn(7, P, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(7, 23, dtype=torch.float64)
    # torch.nn.BatchNorm1d loads copies of its weight and bias, so these two are left out.
    inputs = [x, gate.query, gate.row_keys, gate.column_keys]
    wanted = torch.autograd.grad((plain_weights(gate, x) * cotangent).sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad((gate(x).weights * cotangent).sum(), inputs), wanted)


@pytest.mark.parametrize("mask", [None, "padding"])
def test_running_averages_are_those_of_batch_norm_over_the_rows_that_are_no_padding(mask):
    gate = ProductKeyGate(P, 9, query_features=6)
    norm = torch.nn.BatchNorm1d(6)
    for _ in range(3):
        x = torch.randn(4, 5, P)
        is_row = torch.rand(4, 5) < 0.6 if mask else torch.ones(4, 5, dtype=torch.bool)
        gate(x, mask=is_row if mask else None)
        norm(x[is_row] @ gate.query.t())
    torch.testing.assert_close(gate.running_mean, norm.running_mean)
    torch.testing.assert_close(gate.running_var, norm.running_var)


@pytest.mark.parametrize("rows", [0, 1])
def test_batches_of_none_and_one_and_of_padding_use_the_running_averages_and_keep_them(rows):
    gate = made_gate(9)
    before = gate.running_mean.clone(), gate.running_var.clone()
    x = torch.randn(rows, P, dtype=torch.float64)
    padded, mask = torch.cat((x, torch.randn(3, P, dtype=torch.float64))), torch.arange(rows + 3) < rows
    trained, with_padding = gate(x).weights, gate(padded, mask=mask).weights
    assert torch.equal(gate.running_mean, before[0])
    assert torch.equal(gate.running_var, before[1])
    torch.testing.assert_close(trained, gate.eval()(x).weights)
    torch.testing.assert_close(with_padding[:rows], trained)
    assert (with_padding[rows:] == 0).all()


def test_half_precision_keeps_the_running_averages_in_float32():
    gate = ProductKeyGate(P, 9).bfloat16()
    assert gate.row_keys.dtype == torch.bfloat16
    assert gate.running_mean.dtype == gate.running_var.dtype == torch.float32
    assert gate(torch.randn(4, P, dtype=torch.bfloat16)).weights.dtype == torch.float32


@COMPILED
@pytest.mark.parametrize(("k", "heads"), [(1, 1), (2, 1), (2, 3)])
def test_the_laws_of_gates_hold(k, heads, compiled):
    check_laws(lambda p, n: ProductKeyGate(p, n, k=k, heads=heads, query_features=8), compiled)


def test_heads_pool_their_choices_with_a_sum_of_scale():
    gate, x = made_gate(400, k=3, heads=4, scale=4.0), torch.randn(7, P, dtype=torch.float64)
    torch.testing.assert_close(gate(x).weights.sum(1), torch.full((7,), 4.0, dtype=torch.float64))
    assert not gate.sums_to_one
    assert gate.max_weight_sum == 4


def test_no_tensor_of_a_training_step_has_the_size_of_the_batch_times_the_experts():
    rows, n = 16, 4096
    experts = NeuronExperts(n, P, 3, sparse=True)
    moe = MoE(experts=experts, gate=ProductKeyGate(P, n, k=3, heads=2))
    with torch.profiler.profile(profile_memory=True) as profile:
        y, routing = moe(torch.randn(rows, P))
        y.square().sum().backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert routing.execution == "sparse"
    assert largest < rows * n  # bytes: a quarter of float32 values (rows, n), a twelfth of dense gradients


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "k must be an integer of at least 1, got 0"),
        ({"heads": 0}, "heads must be an integer of at least 1, got 0"),
        ({"query_features": 5}, "query_features must be even, for two halves, got 5"),
        ({"scale": 0}, "scale must be a finite number above 0, got 0"),
    ],
)
def test_settings_that_make_no_gate_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ProductKeyGate(P, 9, **settings)
