"""Other routes for the same samples: what stays, what changes, and what it says about the gate."""

import pytest
import torch
from torch import nn

from comet_moe import MoE, MultiGateMoE, Permutation, PermutedGate, Routing, intervene, routing_gain
from comet_moe.experts import DenseExperts
from comet_moe.gates import CometGate, HashGate, SoftmaxGate, TopKGate
from comet_moe.gates.base import Gate


class Recorded(Gate):
    """A gate that returns the weights it was given."""

    def __init__(self, weights):
        super().__init__()
        self.num_experts = weights.shape[-1]
        self.register_buffer("weights", weights)

    def forward(self, x, keys=None, mask=None):
        return Routing(weights=self.weights)


def routes(rows=64, n=6, k=2):
    return TopKGate(8, n, k)(torch.randn(rows, 8)).weights.detach()


def weights_under(gate, kind, *, x=None, mask=None, seed=0):
    x = torch.randn(len(gate.weights), 4) if x is None else x
    with intervene(nn.ModuleList([gate]), kind, seed=seed):
        return gate(x, mask=mask).weights


def test_shuffled_rows_are_the_same_rows_in_another_order():
    gate = Recorded(routes())
    shuffled = weights_under(gate, "shuffle")
    assert not torch.equal(shuffled, gate.weights)
    assert sorted(shuffled.tolist()) == sorted(gate.weights.tolist())


def test_random_routes_keep_the_weights_of_a_row_and_use_no_dead_expert():
    weights = routes(rows=2000)
    weights[:, 3] = 0
    gate = Recorded(weights)
    found = weights_under(gate, "random")
    assert torch.equal(found.sort(-1).values, weights.sort(-1).values)
    assert (found[:, 3] == 0).all()
    # The more loaded of two experts stays the more loaded one: 2,000 rows tell loads of 5 % apart.
    load, random_load = ((g > 0).float().mean(0) for g in (weights, found))
    assert (load - random_load).abs().max() < 0.1


def test_mean_weights_are_those_of_all_rows():
    gate = Recorded(routes())
    torch.testing.assert_close(weights_under(gate, "mean"), gate.weights.mean(0).expand_as(gate.weights))


@pytest.mark.parametrize("kind", ["shuffle", "mean", "random"])
def test_padding_has_no_expert_and_lends_no_route(kind):
    weights = torch.eye(4)[torch.arange(40) % 3]
    weights[30:] = torch.eye(4)[3]
    mask = torch.arange(40) < 30
    found = weights_under(Recorded(weights), kind, mask=mask)
    assert (found[30:] == 0).all()
    assert (found[:, 3] == 0).all()


@pytest.mark.parametrize("kind", ["shuffle", "mean", "random"])
def test_rows_of_any_shape_and_empty_batches(kind):
    gate = TopKGate(4, 3, k=1)
    with intervene(gate, kind):
        assert gate(torch.randn(2, 5, 4)).weights.shape == (2, 5, 3)
        assert gate(torch.randn(0, 4)).weights.shape == (0, 3)
        assert gate(torch.randn(1, 4)).weights.shape == (1, 3)


def test_the_same_seed_gives_the_same_routes_and_the_model_is_left_as_it_was():
    gate = Recorded(routes())
    first, again, other = (weights_under(gate, "shuffle", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(gate(torch.randn(64, 4)).weights, gate.weights)


def test_tasks_of_a_sample_stay_together():
    weights = routes()
    moe = MultiGateMoE(experts=DenseExperts(6, 4, 4), gates=[Recorded(weights), Recorded(weights.clone())])
    with intervene(moe, "shuffle"):
        _, (one, two) = moe(torch.randn(64, 4))
    assert torch.equal(one.weights, two.weights)


def test_a_wrapped_gate_is_changed_once():
    gate = PermutedGate(CometGate(8, 4, k=1), Permutation(4, steps=0))
    moe = MoE(experts=DenseExperts(4, 8, 8), gate=gate, return_routing=False)
    found = routing_gain(moe, [torch.randn(16, 8)], lambda model, x: model(x).square().mean(-1))
    assert list(found["by_gate"]) == ["gates.0"]


def regimes(rows=400):
    """Two formulas, chosen by the sign of the first feature, and experts that know them."""
    torch.manual_seed(0)
    x = torch.randn(rows, 4)
    experts = DenseExperts(2, 4, 1, activation="identity")
    gate = Recorded(torch.stack((x[:, 0] > 0, x[:, 0] <= 0), -1).float())
    moe = MoE(experts=experts, gate=gate, return_routing=False)
    return moe, x, moe(x).detach()


def squared(model, batch):
    return (model(batch[0]) - batch[1]).square().mean(-1)


def test_the_gain_is_what_specialists_lose_by_the_wrong_samples():
    moe, x, y = regimes()
    found = routing_gain(moe, [(x, y)], squared)
    assert found["loss"] == pytest.approx(0, abs=1e-12)
    low, high = found["interval"]
    assert 0 < low < found["gain"] < high
    other = MoE(experts=moe.experts, gate=Recorded(1 - moe.gate.weights), return_routing=False)
    wrong = squared(other, (x, y)).mean().item()
    # Half of the samples exchange their route with one of the other regime; 400 rows vary by a few percent.
    assert found["gain"] == pytest.approx(wrong / 2, rel=0.2)


@pytest.mark.parametrize("kind", ["shuffle", "mean"])
def test_a_static_gate_gains_nothing(kind):
    x = torch.randn(50, 8)
    gate = CometGate(8, 4, k=2)
    with torch.no_grad():
        for parameter in (gate.split_weight, gate.leaf_weight):
            parameter.zero_()
    moe = MoE(experts=DenseExperts(4, 8, 1), gate=gate, return_routing=False)
    found = routing_gain(moe, [(x, torch.randn(50, 1))], squared, kind=kind)
    assert found["gain"] == pytest.approx(0, abs=1e-6)
    assert found["interval"] == pytest.approx([0, 0], abs=1e-6)


def test_hash_routes_can_be_exchanged():
    keys = torch.arange(32)
    moe = MoE(experts=DenseExperts(4, 8, 1), gate=HashGate(32, 4), return_routing=False)
    found = routing_gain(moe, [torch.randn(32, 8)], lambda model, x: model(x, keys=keys).square().mean(-1))
    assert found["samples"] == 32


def test_each_gate_has_its_own_gain():
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    routed = torch.eye(2)[(x[:, 0] > 0).long()]
    gates = [Recorded(routed), Recorded(torch.tensor([1.0, 0.0]).repeat(200, 1))]
    moe = MultiGateMoE(experts=DenseExperts(2, 4, 1), gates=gates)
    ys = [y.detach() for y in moe(x)[0]]

    def loss(model, batch):
        return sum((y - right).square().mean(-1) for y, right in zip(model(batch)[0], ys, strict=True))

    found = routing_gain(moe, [x], loss)
    assert found["by_gate"]["gates.1"]["gain"] == 0
    assert found["by_gate"]["gates.0"]["gain"] == pytest.approx(found["gain"])


def test_batches_may_be_a_generator_and_losses_means():
    moe, x, y = regimes()
    moe = MoE(experts=moe.experts, gate=SoftmaxGate(4, 2), return_routing=False)
    found = routing_gain(
        moe,
        ((x[i : i + 100], y[i : i + 100]) for i in range(0, 400, 100)),
        lambda model, batch: squared(model, batch).mean(),
        repeats=2,
    )
    assert found["samples"] == 4


def test_batches_in_another_order_on_every_pass_are_compared_row_by_row():
    moe, x, y = regimes()
    moe = MoE(experts=moe.experts, gate=CometGate(4, 2), return_routing=False)
    rows = torch.utils.data.TensorDataset(x, y)

    def measure(batches):
        return routing_gain(moe, batches, squared, kind="mean", repeats=2)

    shuffled = torch.utils.data.DataLoader(rows, batch_size=len(rows), shuffle=True)
    assert measure(shuffled)["interval"] == pytest.approx(measure([(x, y)])["interval"], rel=1e-4)


def test_one_mixture_may_be_given_by_its_name():
    moe, x, _ = regimes()
    with intervene(moe, "mean", gates="gates.0"):
        changed = moe(x)
    assert not torch.equal(changed, moe(x))


def test_the_mode_of_every_module_is_restored():
    moe, x, y = regimes()
    moe.train()
    moe.experts.eval()
    routing_gain(moe, [(x, y)], squared, repeats=1)
    assert moe.training
    assert not moe.experts.training


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda moe: intervene(moe, "swap").__enter__(),
            "kind is 'swap': choose one of",
        ),
        (
            lambda moe: intervene(moe, "mean", gates=["h", "g"]).__enter__(),
            "no mixture 'g', 'h' in the model: choose",
        ),
        (lambda moe: intervene(nn.Linear(2, 2), "mean").__enter__(), "has no mixtures of experts: give a"),
        (lambda moe: routing_gain(moe, [], squared), "batches is empty"),
        (lambda moe: routing_gain(moe, [1], squared, repeats=0), "repeats must be"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    moe, _, _ = regimes()
    with pytest.raises(ValueError, match=message):
        call(moe)


def test_the_gain_of_each_group_is_that_of_its_rows():
    torch.manual_seed(0)
    moe = MoE(experts=DenseExperts(4, 8, 1), gate=TopKGate(8, 4, k=1), return_routing=False)
    x = torch.randn(60, 8)
    batches = [(x[:40], moe(x[:40]).detach()), (x[40:], moe(x[40:]).detach())]
    found = routing_gain(moe, batches, squared, groups=lambda batch: batch[0][:, 0] > 0)
    is_positive = x[:, 0] > 0
    gains = found["by_group"]
    shares = {True: is_positive.float().mean().item(), False: (~is_positive).float().mean().item()}
    assert sum(shares[group] * gains[group]["gain"] for group in gains) == pytest.approx(found["gain"])
    assert all(part["interval"][0] <= part["gain"] <= part["interval"][1] for part in gains.values())
    with pytest.raises(ValueError, match="groups must name the group of each of the 60 losses, got 2"):
        routing_gain(moe, batches, squared, groups=lambda batch: ["one"])
