"""check_gate passes on every gate of the library, and each law fails on a gate that breaks it."""

import pytest
import torch
from torch import nn

from comet_moe import Permutation, PermutedGate, Routing
from comet_moe.gates import CometGate, DSelectKGate, Gate, HashGate, SoftmaxGate, TopKGate
from comet_moe.testing import LAWS, check_gate


def permuted(make, trees=None):
    return lambda p, n: PermutedGate(make(p, n), Permutation(n, steps=5, trees=trees))


OURS = {
    "comet": lambda p, n: CometGate(p, n, k=2, entropy=0.1),
    "comet-1": lambda p, n: CometGate(p, n, k=1),
    "topk": lambda p, n: TopKGate(p, n, k=2),
    "topk-1": lambda p, n: TopKGate(p, n, k=1),
    "topk-noise": lambda p, n: TopKGate(p, n, k=2, noise=True),
    "topk-all": lambda p, n: TopKGate(p, n, k=1, normalize="all"),
    "dselect": lambda p, n: DSelectKGate(p, n, k=2, entropy=0.1, reachability=0.1),
    "dselect-1": lambda p, n: DSelectKGate(p, n, k=1),
    "hash": lambda p, n: HashGate(16, n),
    "softmax": SoftmaxGate,
}
OURS |= {f"{name}+": permuted(make) for name, make in OURS.items()}
OURS["comet+ per tree"] = permuted(OURS["comet"], trees=2)


@pytest.mark.parametrize("name", OURS)
def test_our_gates_keep_every_law(name):
    check_gate(OURS[name])


class Plain(Gate):
    """A correct gate of a user's own; the broken ones below each change one thing."""

    def __init__(self, in_features, num_experts):
        super().__init__()
        self.num_experts = num_experts
        self.linear = nn.Linear(in_features, num_experts)

    def idle_parameters(self):
        return {"linear.weight", "linear.bias"} if self.num_experts == 1 else set()

    def forward(self, x, keys=None, mask=None):
        return Routing(weights=self.linear(x).softmax(-1))


def test_a_users_gate_keeps_every_law():
    check_gate(Plain)


class NoScalarLoss(Plain):
    def forward(self, x, keys=None, mask=None):
        return Routing(weights=self.linear(x).softmax(-1), aux_loss=x.new_zeros(2))


class SkipsHooks(Plain):
    def __call__(self, x, keys=None, mask=None):
        return type(self).forward(self, x, keys=keys, mask=mask)


class LooksAtOtherRows(Plain):
    def forward(self, x, keys=None, mask=None):
        return Routing(weights=self.linear(x - x.mean(0)).softmax(-1))


class NegativeWeights(Plain):
    def forward(self, x, keys=None, mask=None):
        return Routing(weights=self.linear(x))


class TooManyExperts(Plain):
    k = 2

    def forward(self, x, keys=None, mask=None):
        return Routing(weights=(self.linear(x).softmax(-1) + 1 / self.num_experts) / 2)


class DeadParameter(Plain):
    def __init__(self, in_features, num_experts):
        super().__init__(in_features, num_experts)
        self.forgotten = nn.Parameter(torch.ones(3))


class NanAtBalance(Plain):
    def forward(self, x, keys=None, mask=None):
        logits = self.linear(x - 0)
        spread = (x / x.norm(dim=-1, keepdim=True)).sum(-1, keepdim=True)
        return Routing(weights=(logits + 0 * spread).softmax(-1))


class HalfPrecision(Plain):
    def forward(self, x, keys=None, mask=None):
        with torch.autocast("cpu", torch.bfloat16, enabled=True):
            return Routing(weights=self.linear(x).softmax(-1))


class StateOutsideBuffers(Plain):
    def __init__(self, in_features, num_experts):
        super().__init__(in_features, num_experts)
        self.shift = torch.randn(num_experts)

    def forward(self, x, keys=None, mask=None):
        return Routing(weights=(self.linear(x) + self.shift).softmax(-1))


class Undeclared(Plain):
    def forward(self, x, keys=None, mask=None):
        logits = self.linear(x)
        return Routing(weights=(logits + torch.randn_like(logits)).softmax(-1))


class LossInEvaluation(Plain):
    def forward(self, x, keys=None, mask=None):
        weights = self.linear(x).softmax(-1)
        return Routing(weights=weights, aux_loss=weights.square().mean())


class CountsPadding(Plain):
    def forward(self, x, keys=None, mask=None):
        weights = self.linear(x).softmax(-1)
        aux_loss = weights.square().sum(-1).mean() if self.training else None
        return Routing(weights=weights, aux_loss=aux_loss)


class GradientWhereWeightIsZero(Plain):
    k = 2

    def forward(self, x, keys=None, mask=None):
        soft = self.linear(x).softmax(-1)
        kept = soft.topk(min(2, self.num_experts), dim=-1).indices
        hard = torch.zeros_like(soft).scatter(-1, kept, 1 / kept.shape[-1])
        return Routing(weights=hard + soft - soft.detach())  # straight through, of weight 0 too


class BreaksTheGraph(Plain):
    def forward(self, x, keys=None, mask=None):
        torch._dynamo.graph_break()
        return Routing(weights=self.linear(x).softmax(-1))


class LosesMassWithEveryPass(Plain):
    sums_to_one = False
    stochastic = True

    def __init__(self, in_features, num_experts):
        super().__init__(in_features, num_experts)
        self.register_buffer("passes", torch.ones(()))

    def forward(self, x, keys=None, mask=None):
        self.passes += self.training
        return Routing(weights=self.linear(x).softmax(-1) / self.passes)


BROKEN = {
    "contract": NoScalarLoss,
    "hooks": SkipsHooks,
    "rows_are_independent": LooksAtOtherRows,
    "simplex": NegativeWeights,
    "cardinality": TooManyExperts,
    "gradient": DeadParameter,
    "finite": NanAtBalance,
    "autocast": HalfPrecision,
    "round_trip": StateOutsideBuffers,
    "deterministic": Undeclared,
    "evaluation": LossInEvaluation,
    "padding": CountsPadding,
    "dense_equals_sparse": GradientWhereWeightIsZero,
    "compiles": BreaksTheGraph,
    "permutes": LosesMassWithEveryPass,
}


def test_there_is_a_broken_gate_for_every_law():
    assert BROKEN.keys() == LAWS.keys()


@pytest.mark.parametrize("law", BROKEN)
def test_the_error_names_the_law_that_is_broken(law):
    with pytest.raises(AssertionError, match=f"^{law}: "):
        check_gate(BROKEN[law])
