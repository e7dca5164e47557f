"""Bad input: a ValueError that names the value and the limit."""

import pytest
import torch

import comet_moe
from comet_moe import MoE, MultiGateMoE, Permutation, PermutedGate, sinkhorn
from comet_moe.experts import ConvExperts, DenseExperts, FeedForwardExperts
from comet_moe.gates import (
    CometGate,
    DSelectKGate,
    ExpertChoiceGate,
    HashGate,
    ReluGate,
    SoftmaxGate,
    TopKGate,
)

TRAINABLE = [CometGate, TopKGate, DSelectKGate, SoftmaxGate, ReluGate, ExpertChoiceGate]


@pytest.mark.parametrize("kind", TRAINABLE)
@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.randn(4), r"shape \(B, ..., features\), got \(4,\)"),
        (torch.randn(2, 5), "4 features in its last dimension, got 5"),
        (torch.ones(2, 4, dtype=torch.int64), "floating-point dtype, got torch.int64"),
        (torch.randn(2, 4, dtype=torch.float64), "computes in torch.float32, its input is torch.float64"),
        (torch.full((2, 4), float("nan")), "must be finite, got 8 NaN or infinite values of 8"),
        (torch.full((2, 4), float("inf")), "must be finite"),
        ([[1.0] * 4], "must be a tensor, got list"),
    ],
    ids=["rank", "features", "integers", "dtype", "nan", "inf", "list"],
)
def test_gates_refuse(kind, x, says):
    with pytest.raises(ValueError, match=says):
        kind(4, 3)(x)


def test_value_checks_can_be_switched_off():
    comet_moe.set_value_checks(False)
    try:
        SoftmaxGate(4, 3)(torch.full((2, 4), float("nan")))
    finally:
        comet_moe.set_value_checks(True)


def test_huge_but_finite_input_is_taken():
    SoftmaxGate(4, 3)(torch.full((2, 4), 3e38))


CONSTRUCTORS = [
    (lambda: CometGate(0, 3), "in_features must be an integer of at least 1, got 0"),
    (lambda: CometGate(4, 0), "num_experts must be an integer of at least 1, got 0"),
    (lambda: CometGate(4, 3, k=0), "k must be an integer of at least 1, got 0"),
    (lambda: CometGate(4, 3, k=1.5), "k must be an integer of at least 1, got 1.5"),
    (lambda: CometGate(4, 3, gamma=0), "gamma must be a finite number above 0, got 0"),
    (lambda: CometGate(4, 3, entropy=-1), "entropy must be a finite number of at least 0, got -1"),
    (lambda: TopKGate(4, 3, k=0), "k must be an integer of at least 1, got 0"),
    (lambda: TopKGate(4, 3, normalize="none"), 'normalize must be "selected" or "all", got \'none\''),
    (lambda: TopKGate(4, 3, score="tanh"), 'score must be "softmax" or "sigmoid", got \'tanh\''),
    (lambda: TopKGate(4, 3, bias_update=-1), "bias_update must be a finite number of at least 0, got -1"),
    (lambda: TopKGate(4, 3, scale=0), "scale must be a finite number above 0, got 0"),
    (lambda: TopKGate(4, 6, groups=4), "groups must divide the number of experts, 6, got 4"),
    (lambda: TopKGate(4, 6, groups=0), "groups must be an integer of at least 1, got 0"),
    (lambda: TopKGate(4, 6, groups=2, top_groups=3), "top_groups must be at most groups, 2, got 3"),
    (lambda: TopKGate(4, 6, k=3, groups=3), "k must be at most 2, the experts in 1 of 3 groups, got 3"),
    (lambda: ReluGate(4, 3, target=0), "target must be an integer of at least 1, got 0"),
    (lambda: ExpertChoiceGate(4, 3, capacity=0), "capacity must be a finite number above 0, got 0"),
    (lambda: DSelectKGate(4, 3, k=-1), "k must be an integer of at least 1, got -1"),
    (lambda: DSelectKGate(4, 3, reachability=-0.1), "reachability must be .* at least 0, got -0.1"),
    (lambda: HashGate(0, 3), "num_keys must be an integer of at least 1, got 0"),
    (
        lambda: HashGate.balanced(torch.tensor([1.0, -2.0]), 2),
        "frequencies must be finite numbers of at least 0, got -2",
    ),
    (lambda: Permutation(0, steps=1), "num_experts must be an integer of at least 1, got 0"),
    (lambda: Permutation(3, steps=-1), "steps must be an integer of at least 0, got -1"),
    (lambda: Permutation(3, steps=2.5), "steps must be an integer of at least 0, got 2.5"),
    (lambda: Permutation(3, steps=1, zeta=-1), "zeta must be .* at least 0, got -1"),
    (lambda: Permutation(3, steps=1, tau=(1e-3, 0)), "tau must be a finite number above 0, got 0"),
    (lambda: Permutation(3, steps=1, iterations=(0, 5)), r"iterations must be .* at least 1, got 0"),
    (lambda: PermutedGate(CometGate(4, 3), Permutation(5, steps=1)), "over 5 experts, the gate over 3"),
    (lambda: PermutedGate(CometGate(4, 3, k=2), Permutation(3, 1, trees=4)), "has 4 trees, the gate has k=2"),
    (lambda: sinkhorn(torch.zeros(3, 4)), r"square matrices \(..., n, n\), got shape \(3, 4\)"),
    (lambda: sinkhorn(torch.zeros(3, 3), tau=-1), "tau must be a finite number above 0, got -1"),
    (lambda: DenseExperts(3, 4, 0), "out_features must be an integer of at least 1, got 0"),
    (lambda: DenseExperts(3, 4, 5, activation="swish"), "activation must be one of relu.* got 'swish'"),
    (lambda: FeedForwardExperts(3, 4, 5, dropout=1.0), "dropout must be at least 0 and below 1, got 1.0"),
    (lambda: ConvExperts(2, (1, 6, 6), (4, 4), 5), "images of 6x6 are too small"),
    (lambda: MoE(experts=DenseExperts(3, 4, 5), gate=CometGate(4, 6)), "among 6 experts, there are 3"),
    (lambda: MultiGateMoE(experts=DenseExperts(3, 4, 5), gates=[]), "at least 1 gate, got none"),
    (lambda: MoE(experts=[torch.nn.Linear(4, 3)], gate=CometGate(4, 1)), "an nn.ModuleList, got list"),
    (lambda: MoE(experts=torch.nn.ModuleList(), gate=CometGate(4, 1)), "at least 1 module"),
    (lambda: MoE(experts=DenseExperts(3, 4, 5), gate=CometGate(4, 3), execution="fast"), "got 'fast'"),
]


@pytest.mark.parametrize(("construct", "says"), CONSTRUCTORS, ids=[says[:40] for _, says in CONSTRUCTORS])
def test_constructors_refuse(construct, says):
    with pytest.raises(ValueError, match=says):
        construct()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (None, r"needs keys of shape \(2,\), got None"),
        (torch.tensor([0, 9]), "keys must be in 0..8, got 9"),
        (torch.tensor([-1, 3]), "keys must be in 0..8, got -1"),
        (torch.tensor([0.0, 1.0]), "keys must be a tensor of torch.int64, got torch.float32"),
        (torch.tensor([0, 1, 2]), r"keys must have shape \(2,\), got \(3,\)"),
    ],
)
def test_hash_refuses_keys(keys, says):
    with pytest.raises(ValueError, match=says):
        HashGate(9, 3)(torch.randn(2, 4), keys=keys)


def test_padding_may_have_any_key():
    gate, mask = HashGate(9, 3), torch.tensor([True, False])
    weights = gate(torch.randn(2, 4), keys=torch.tensor([4, -100]), mask=mask).weights
    assert weights.sum(-1).tolist() == [1, 0]


def test_masks_are_bool_and_fit():
    gate = CometGate(4, 3)
    with pytest.raises(ValueError, match=r"mask must be a tensor of torch.bool, got torch.float32"):
        gate(torch.randn(2, 4), mask=torch.ones(2))
    with pytest.raises(ValueError, match=r"mask must have shape \(2,\), got \(2, 1\)"):
        gate(torch.randn(2, 4), mask=torch.ones(2, 1, dtype=torch.bool))


def test_a_permutation_a_tree_needs_trees():
    gate = PermutedGate(TopKGate(4, 3, k=2), Permutation(3, steps=1, trees=2))
    with pytest.raises(ValueError, match="TopKGate has no trees"):
        gate(torch.randn(2, 4))
