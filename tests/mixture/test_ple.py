"""CGC and PLE against their definition written as loops, dense and sparse, with any gate."""

import pytest
import torch

from comet_moe.experts import DenseExperts
from comet_moe.gates import CometGate, SoftmaxGate, TopKGate
from comet_moe.mixture.ple import CGC, PLE

P, U, TASKS, PRIVATE, SHARED = 6, 6, 2, 2, 3

GATES = {
    "softmax": SoftmaxGate,
    "topk": lambda p, n: TopKGate(p, n, k=2),
    "comet": lambda p, n: CometGate(p, n, k=2, gamma=0.1, entropy=0.1),
}


def build(kind, gate, **settings):
    torch.manual_seed(0)
    return kind(
        num_tasks=TASKS,
        in_features=P,
        private=PRIVATE,
        shared=SHARED,
        experts=lambda n, p: DenseExperts(n, p, U),
        gate=GATES[gate],
        **settings,
    )


def by_definition(layer, inputs):
    """One CGC layer expert by expert, from its own gates."""
    outputs = []
    experts = [
        (stack, i, x) for stack, x in zip(layer.stacks, inputs, strict=True) for i in range(stack.num_experts)
    ]
    for gate, x in zip(layer.gates, inputs, strict=False):
        weights = gate(x).weights
        outputs.append(
            sum(
                weights[:, i : i + 1] * stack.dense(own)[:, j].relu()
                for i, (stack, j, own) in enumerate(experts)
            )
        )
    return outputs


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("execution", ["dense", "sparse", "auto"])
def test_a_layer_equals_its_definition(gate, execution):
    layer = build(CGC, gate, mixes_shared=True, execution=execution)
    inputs = [torch.randn(7, P) for _ in range(TASKS + 1)]
    ys, routings = layer(inputs)
    for y, wanted in zip(ys, by_definition(layer, inputs), strict=True):
        torch.testing.assert_close(y, wanted)
    assert len(routings) == TASKS + 1
    assert {routing.execution for routing in routings} <= {"dense", "sparse"}


@pytest.mark.parametrize("gate", GATES)
def test_two_layers_equal_their_definition(gate):
    ple = build(PLE, gate, layers=2, out_features=U)
    x = torch.randn(7, P)
    ys, routings = ple(x)
    hidden = by_definition(ple.layers[0], [x] * 3)
    for y, wanted in zip(ys, by_definition(ple.layers[1], hidden), strict=True):
        torch.testing.assert_close(y, wanted)
    assert len(routings) == 5


@pytest.mark.parametrize("gate", GATES)
def test_dense_and_sparse_execution_have_equal_gradients(gate):
    x, gradients = torch.randn(7, P), {}
    for execution in ("dense", "sparse"):
        ple = build(PLE, gate, layers=2, out_features=U, execution=execution)
        ys, routings = ple(x)
        (sum(y.square().sum() for y in ys) + sum(routing.aux_loss for routing in routings)).backward()
        gradients[execution] = {name: p.grad for name, p in ple.named_parameters()}
    for name, dense in gradients["dense"].items():
        torch.testing.assert_close(gradients["sparse"][name], dense, msg=name)


def test_a_task_never_uses_the_private_experts_of_another():
    _, routings = build(CGC, "softmax")(torch.randn(7, P))
    assert routings[0].weights[:, 2:4].count_nonzero() == 0
    assert routings[1].weights[:, :2].count_nonzero() == 0
    assert routings[0].weights[:, 4:].count_nonzero() == 7 * SHARED


def test_only_selected_experts_are_counted():
    layer = build(CGC, "topk", execution="sparse")
    _, routings = layer(torch.randn(50, P))
    pairs = set()
    for routing in routings:
        sample, expert, _ = routing.pairs()
        pairs |= set(zip(sample.tolist(), expert.tolist(), strict=True))
    assert routings[0].expert_rows == len(pairs)
    gates = 50 * TASKS * 2 * P * (PRIVATE + SHARED)
    assert layer.flops(routings) == len(pairs) * 2 * P * U + gates
    dense = build(CGC, "topk", execution="dense")
    assert dense(torch.randn(50, P))[1][0].expert_rows == 50 * 7


def test_evaluation_without_gradients_agrees_with_training():
    ple = build(PLE, "comet", layers=2, out_features=U)
    x = torch.randn(7, P)
    with torch.no_grad():
        trained = ple(x)[0]
        evaluated = ple.eval()(x)[0]
    for y, wanted in zip(evaluated, trained, strict=True):
        torch.testing.assert_close(y, wanted)


def test_padding_has_no_output():
    mask = torch.tensor([True, False, True])
    ys, _ = build(CGC, "topk")(torch.randn(3, P), mask=mask)
    for y in ys:
        assert y[1].count_nonzero() == 0


def test_wrong_inputs_are_one_sentence():
    with pytest.raises(
        ValueError, match="inputs must be one tensor or 3, one per task and the shared one, got 2"
    ):
        build(CGC, "topk")([torch.randn(3, P)] * 2)
    with pytest.raises(ValueError, match="shared must be an integer of at least 1, got 0"):
        CGC(num_tasks=2, in_features=P, private=1, shared=0, experts=None, gate=None)
