"""WarmupGate: uniform first, the gate itself at last, and a checkpoint in between."""

import copy

import pytest
import torch
from gate_laws import COMPILED, check_laws

import comet_moe
from comet_moe import MoE, Permutation, PermutedGate
from comet_moe.experts import DenseExperts
from comet_moe.gates import CometGate, DSelectKGate, HashGate, TopKGate, WarmupGate

GATES = {
    "topk": lambda p, n: WarmupGate(TopKGate(p, n, k=2), steps=3),
    "comet": lambda p, n: WarmupGate(CometGate(p, n, k=2, entropy=0.1), steps=3),
    "hash": lambda p, n: WarmupGate(HashGate(16, n), steps=3),
    "inside a search": lambda p, n: PermutedGate(WarmupGate(TopKGate(p, n, k=2), steps=3), Permutation(n, 5)),
}


def stepped(make, steps):
    """Gates after some optimiser steps; before the first one the gate inside has no influence at all."""

    def build(p, n):
        gate = make(p, n)
        for _ in range(steps):
            comet_moe.step(gate)
        return gate

    return build


@COMPILED
@pytest.mark.parametrize("name", GATES)
def test_gates_in_warm_up_keep_every_law(name, compiled):
    check_laws(stepped(GATES[name], 1), compiled)


@COMPILED
@pytest.mark.parametrize("name", ["topk", "comet"])
def test_gates_after_their_warm_up_keep_every_law(name, compiled):
    check_laws(stepped(GATES[name], 3), compiled)


def test_weights_go_from_uniform_to_those_of_the_gate():
    inner = TopKGate(8, 4, k=2)
    gate, x = WarmupGate(inner, steps=4), torch.randn(5, 8)
    for step in range(6):
        share = max(0.0, 1 - step / 4)
        torch.testing.assert_close(gate(x).weights, (1 - share) * inner(x).weights + share / 4)
        assert gate.warming == (step < 4)
        comet_moe.step(gate)
    assert torch.equal(gate(x).weights, inner(x).weights)


def test_weights_of_a_scaled_gate_sum_to_its_scale_from_the_first_step():
    gate = WarmupGate(CometGate(4, 6, k=2, scale=2.5), steps=2)
    for _ in range(3):
        torch.testing.assert_close(gate(torch.randn(5, 4)).weights.sum(-1), torch.full((5,), 2.5))
        comet_moe.step(gate)


def test_evaluation_uses_the_gate_alone():
    inner = TopKGate(8, 4, k=2)
    gate, x = WarmupGate(inner, steps=4).eval(), torch.randn(5, 8)
    assert torch.equal(gate(x).weights, inner(x).weights)


def test_execution_turns_sparse_by_itself_when_the_warm_up_ends():
    moe = MoE(experts=DenseExperts(8, 8, 3), gate=WarmupGate(TopKGate(8, 8, k=2), steps=1))
    x = torch.randn(16, 8)
    assert moe(x)[1].execution == "dense"
    comet_moe.step(moe)
    assert moe(x)[1].execution == "sparse"


@pytest.mark.parametrize("is_rescaled", [False, True])
def test_execution_turns_sparse_on_an_accelerator_too(is_rescaled, monkeypatch):
    gate = TopKGate(8, 8, k=2)
    if is_rescaled:
        pytest.importorskip("transformers", reason="needs the extra comet-moe[hf]")
        from comet_moe.hf import RescaledGate

        gate = RescaledGate(TopKGate(8, 8, k=2, normalize="all"))
    monkeypatch.setattr("comet_moe.mixture.dispatch.counts_are_known", lambda x: False)
    moe = MoE(experts=DenseExperts(8, 8, 3), gate=WarmupGate(gate, steps=2))
    x = torch.randn(16, 8)
    executions = []
    for _ in range(3):
        executions.append(moe(x)[1].execution)
        comet_moe.step(moe)
    assert executions == ["dense", "dense", "sparse"]
    restored = WarmupGate(TopKGate(8, 8, k=2), steps=2)
    restored.progress.fill_(2)  # in place, as a checkpoint that is loaded does
    assert restored(x).most_experts == 2


def test_the_end_of_the_warm_up_compiles_once_more_and_its_steps_do_not():
    gate, x = WarmupGate(TopKGate(8, 4, k=2), steps=20), torch.randn(5, 8)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: gate(x).weights, backend=count)
    for _ in range(25):
        torch.testing.assert_close(compiled(x), gate(x).weights)
        comet_moe.step(gate)
    assert len(graphs) == 2


@pytest.mark.parametrize("kind", [CometGate, DSelectKGate])
def test_the_contributions_of_trees_warm_up_as_the_weights_do(kind):
    gate, mask = WarmupGate(kind(8, 4, k=2), steps=4), torch.tensor([True, False, True])
    search = Permutation(4, steps=5, trees=2)
    for _ in range(6):
        routing = gate(torch.randn(3, 8), mask=mask)
        torch.testing.assert_close(routing.contributions.sum(-2), routing.weights)
        permuted = PermutedGate(gate, search)(torch.randn(3, 8), mask=mask)
        torch.testing.assert_close(permuted.weights.sum(-1), mask.float())
        comet_moe.step(gate)


def test_progress_is_saved():
    gate = WarmupGate(TopKGate(8, 4, k=2), steps=4)
    comet_moe.step(gate)
    other = WarmupGate(TopKGate(8, 4, k=2), steps=4)
    other.load_state_dict(copy.deepcopy(gate.state_dict()))
    x = torch.randn(5, 8)
    assert torch.equal(gate(x).weights, other(x).weights)


def test_padding_stays_without_weight():
    mask = torch.tensor([True, False, True])
    weights = WarmupGate(TopKGate(8, 4, k=2), steps=4)(torch.randn(3, 8), mask=mask).weights
    assert weights[1].count_nonzero() == 0
    assert weights[0].count_nonzero() == 4


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_steps_must_be_positive(steps):
    with pytest.raises(ValueError, match="steps must be an integer of at least 1"):
        WarmupGate(TopKGate(8, 4, k=2), steps=steps)
