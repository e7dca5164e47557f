"""SubsetGate and UniformGate: every form of a routing, the laws, and wrong subsets."""

import pytest
import torch
from gate_laws import COMPILED, check_laws

from comet_moe import MultiGateMoE
from comet_moe.experts import DenseExperts
from comet_moe.gates import CometGate, SoftmaxGate, SubsetGate, TopKGate, UniformGate


def last_experts(make, share=2):
    """A gate over the last experts of ``n``."""

    def build(p, n):
        own = max(1, n // share)
        return SubsetGate(make(p, own), experts=range(n - own, n), num_experts=n)

    return build


GATES = {
    "softmax": last_experts(SoftmaxGate),
    "topk": last_experts(lambda p, n: TopKGate(p, n, k=1, normalize="all")),
    "comet": last_experts(lambda p, n: CometGate(p, n, k=2, entropy=0.1)),
    "uniform": lambda p, n: UniformGate(n),
}


@COMPILED
@pytest.mark.parametrize("name", GATES)
def test_gates_over_some_experts_keep_every_law(name, compiled):
    check_laws(GATES[name], compiled)


@pytest.mark.parametrize("gate", [CometGate(8, 3, k=2), TopKGate(8, 3, k=2), SoftmaxGate(8, 3)])
def test_all_forms_of_a_routing_have_the_experts_of_the_subset(gate):
    subset, x = SubsetGate(gate, experts=[4, 0, 2], num_experts=5), torch.randn(6, 8)
    for module in (gate, subset):
        module.eval()
    with torch.no_grad():
        inner, outer = gate(x), subset(x)
        assert outer.in_pairs == inner.in_pairs
    wanted = torch.zeros(6, 5)
    wanted[:, [4, 0, 2]] = inner.weights
    assert torch.equal(outer.weights, wanted)
    assert torch.equal(outer.pairs().weight.sort().values, inner.pairs().weight.sort().values)
    trained = subset.train()(x)
    if trained.selectors is not None:
        assert trained.selectors[..., [1, 3]].count_nonzero() == 0
    if trained.logits is not None:
        assert bool((trained.logits[..., [1, 3]] == -torch.inf).all())


def test_experts_outside_the_subset_get_no_gradient():
    gates = [SubsetGate(SoftmaxGate(8, 2), experts=own, num_experts=4) for own in ([0, 2], [1, 2])]
    moe = MultiGateMoE(experts=DenseExperts(4, 8, 3), gates=gates)
    ys, _ = moe(torch.randn(6, 8))
    ys[0].sum().backward()
    has_gradient = [bool(grad.abs().sum() > 0) for grad in moe.experts.linear.weight.grad]
    assert has_gradient == [True, False, True, False]


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ([0, 4], r"experts must be in 0\.\.3, got 4"),
        ([0, -1], r"experts must be in 0\.\.3, got -1"),
        ([1, 1], r"experts must be different, got \[1, 1\]"),
        ([0, 1, 2], "the gate chooses among 2 experts, but experts has 3 indices"),
    ],
)
def test_a_wrong_subset_is_one_sentence(experts, message):
    with pytest.raises(ValueError, match=message):
        SubsetGate(SoftmaxGate(8, 2), experts=experts, num_experts=4)
