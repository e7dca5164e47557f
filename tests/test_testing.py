"""check_gate passes on every gate of the library, and each law fails on a gate that breaks it."""

import pytest
import torch
from gate_laws import COMPILED, check_laws
from torch import nn

from comet_moe import Permutation, PermutedGate, Routing
from comet_moe.gates import (
    CometGate,
    DSelectKGate,
    ExpertChoiceGate,
    Gate,
    HashGate,
    ReluGate,
    SoftmaxGate,
    TopKGate,
)
from comet_moe.stepping import Stepped
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
    "sigmoid": lambda p, n: TopKGate(p, n, k=2, score="sigmoid", scale=2.5, bias_update=0.01),
    "relu": lambda p, n: ReluGate(p, n, target=2),
    "expert-choice": lambda p, n: ExpertChoiceGate(p, n, capacity=1.5),
    "dselect": lambda p, n: DSelectKGate(p, n, k=2, entropy=0.1, reachability=0.1),
    "dselect-1": lambda p, n: DSelectKGate(p, n, k=1),
    "hash": lambda p, n: HashGate(16, n),
    "softmax": SoftmaxGate,
}
OURS |= {f"{name}+": permuted(make) for name, make in OURS.items()}
OURS |= {
    "sigmoid-all": lambda p, n: TopKGate(p, n, k=2, score="sigmoid", normalize="all"),
    "topk-balanced": lambda p, n: TopKGate(p, n, k=2, bias_update=0.01),
    "topk-groups": lambda p, n: TopKGate(p, n, k=min(2, n), groups=3 if n == 6 else 1, bias_update=0.01),
}
OURS["comet+ per tree"] = permuted(OURS["comet"], trees=2)


@COMPILED
@pytest.mark.parametrize("name", OURS)
def test_our_gates_keep_every_law(name, compiled):
    check_laws(OURS[name], compiled)


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


class LooksAtOtherRowsInTraining(Plain):
    def forward(self, x, keys=None, mask=None):
        mean = x.flatten(0, -2).mean(0) if self.training and x.numel() else 0.0
        return Routing(weights=self.linear(x - mean).softmax(-1))


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


class MovesInEvaluation(Plain):
    def __init__(self, in_features, num_experts):
        super().__init__(in_features, num_experts)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x, keys=None, mask=None):
        self.passes += 1
        return Routing(weights=self.linear(x).softmax(-1))


class StepsByPadding(Plain, Stepped):
    def __init__(self, in_features, num_experts):
        super().__init__(in_features, num_experts)
        self.register_buffer("rows", torch.zeros(()))
        self.register_buffer("rows_stepped", torch.zeros(()))

    def forward(self, x, keys=None, mask=None):
        self.rows += self.training * x[..., 0].numel()
        return Routing(weights=self.linear(x).softmax(-1))

    def step(self):
        self.rows_stepped += self.rows


class StepsParameters(Plain, Stepped):
    def step(self):
        with torch.no_grad():
            self.linear.bias += 1


class AboveItsLimit(Plain):
    sums_to_one = False
    max_weight_sum = 1.5

    def forward(self, x, keys=None, mask=None):
        return Routing(weights=2 * self.linear(x).softmax(-1))


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
    "state": MovesInEvaluation,
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


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (LooksAtOtherRowsInTraining, "rows_are_independent: weights in batches of 7 and 40, training=True"),
        (AboveItsLimit, "simplex: a row sums to 2"),
        (StepsByPadding, "state: the buffer rows with and without padding differ"),
        (StepsParameters, "state: step changed the parameter linear.bias"),
    ],
)
def test_the_error_says_what_is_wrong(broken, says):
    with pytest.raises(AssertionError, match=f"^{says}"):
        check_gate(broken)


class DependsOnBatch(LooksAtOtherRowsInTraining):
    depends_on_batch = True

    def forward(self, x, keys=None, mask=None):
        if self.training and mask is not None:
            return Routing(weights=self.linear(x - x[mask].mean(0)).softmax(-1))
        return super().forward(x, keys=keys, mask=mask)


class WithinItsLimit(AboveItsLimit):
    max_weight_sum = 2.0


@pytest.mark.parametrize("make", [DependsOnBatch, WithinItsLimit])
def test_a_gate_that_declares_what_it_does_keeps_every_law(make):
    check_gate(make)
