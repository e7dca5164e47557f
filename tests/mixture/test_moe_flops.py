"""Operations by closed form equal those that torch counts while the mixture runs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from comet_moe import MoE, MultiGateMoE, Permutation, PermutedGate
from comet_moe.experts import ConvExperts, DenseExperts, FeedForwardExperts, MLPExperts
from comet_moe.gates import CometGate, DSelectKGate, HashGate, SoftmaxGate, TopKGate

P, N = 48, 10
GATES = {
    "comet": lambda: CometGate(P, N, k=2, gamma=0.5),
    "comet+": lambda: PermutedGate(CometGate(P, N, k=2, gamma=0.5), Permutation(N, steps=0)),
    "dselect": lambda: DSelectKGate(P, N, k=2),
    "topk": lambda: TopKGate(P, N, k=2),
    "hash": lambda: HashGate(7, N),
    "softmax": lambda: SoftmaxGate(P, N),
}
EXPERTS = {
    "dense": (lambda: DenseExperts(N, P, 9), (30, P)),
    "feed-forward": (lambda: FeedForwardExperts(N, P, 20, 9), (3, 10, P)),
    "mlp": (lambda: MLPExperts(N, P, (20, 9)), (30, P)),
    "convolutional": (lambda: ConvExperts(N, (3, 4, 4), (5,), 3, (6,)), (30, 3, 4, 4)),
}


@pytest.mark.parametrize("execution", ["dense", "sparse"])
@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("gradients", [True, False])
def test_the_closed_form_equals_the_count(name, kind, execution, gradients):
    make, shape = EXPERTS[kind]
    moe = MultiGateMoE(experts=make(), gates=[GATES[name]() for _ in range(2)], execution=execution).eval()
    for gate in moe.gates:
        for parameter in gate.parameters():
            torch.nn.init.normal_(parameter)
    x = torch.randn(shape)
    batch = shape[: len(shape) - moe.experts.input_rank]
    keys = torch.randint(7, batch)
    with torch.set_grad_enabled(gradients):
        _, routings = moe(x, keys=keys)
        with FlopCounterMode(display=False) as counter:
            moe(x, keys=keys)
    assert moe.flops(routings) == counter.get_total_flops()


def test_a_routing_that_no_mixture_ran_has_no_count():
    gate = TopKGate(P, N, k=2)
    moe = MoE(experts=DenseExperts(N, P, 9), gate=gate)
    with pytest.raises(ValueError, match="got one that no mixture ran: its expert_rows is None"):
        moe.flops([gate(torch.randn(4, P))])


def test_a_compiled_sparse_mixture_has_the_count_of_an_eager_one():
    moe = MoE(experts=DenseExperts(N, P, 9), gate=TopKGate(P, N, k=2), execution="sparse").eval()
    x = torch.randn(5, P)
    y, routing = moe(x)
    torch._dynamo.reset()
    compiled_y, compiled_routing = torch.compile(moe, backend="eager")(x)
    torch.testing.assert_close(compiled_y, y)
    assert compiled_routing.execution == "sparse"
    assert compiled_routing.expert_rows == routing.expert_rows == 10
    assert moe.flops([compiled_routing]) == moe.flops([routing])


def test_a_hard_tree_costs_its_depth():
    gate = CometGate(P, 64, k=3, gamma=1e-6).eval()
    torch.nn.init.normal_(gate.split_weight)
    with torch.no_grad():
        routing = gate(torch.randn(100, P))
    assert routing.gate_flops == 100 * 3 * (6 + 1) * 2 * P
