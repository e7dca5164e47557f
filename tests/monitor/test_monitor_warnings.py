"""The monitor warns about gates that do not route, once, with what to try; and not about those that route."""

import copy
import io
import pickle
import warnings
from contextlib import suppress

import pytest
import torch
from torch import nn

from comet_moe import MoE, MultiGateMoE, Permutation, PermutedGate, Routing, RoutingMonitor, RoutingWarning
from comet_moe.exceptions import StaticRoutingWarning
from comet_moe.experts import DenseExperts
from comet_moe.gates import Gate, JointSelection, SoftmaxGate, SubsetGate, TopKGate

P, N = 8, 4


def make_model(gate):
    moe = MoE(experts=DenseExperts(N, P, P), gate=gate, return_routing=False)
    return nn.Sequential(nn.Linear(P, P), moe, nn.Linear(P, 1))


def train(model, steps, **options):
    """A little training loop; the warnings about routing that it gave, and the monitor."""
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as given, RoutingMonitor(model, **options) as monitor:
        warnings.simplefilter("always")
        for _ in range(steps):
            x = torch.randn(32, P)
            loss = nn.functional.mse_loss(model(x).squeeze(-1), x[:, 0]) + monitor.aux_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [warning.message for warning in given if issubclass(warning.category, RoutingWarning)], monitor


def constant_gate():
    """All samples go to experts 0 and 1."""
    gate = TopKGate(P, N, k=2)
    with torch.no_grad():
        gate.bias.copy_(torch.tensor([100.0, 99.0, 0.0, 0.0]))
        gate.weight.zero_()
    gate.requires_grad_(False)
    return gate


def nearly_static_gate():
    """Expert 0 for all samples but a few."""
    gate = TopKGate(P, N, k=1)
    with torch.no_grad():
        gate.weight.zero_()
        gate.weight[1, 0] = 1.0
        gate.bias.copy_(torch.tensor([2.6, 0.0, -9.0, -9.0]))
    gate.requires_grad_(False)
    return gate


def test_a_static_gate_is_warned_of_once_within_a_hundred_steps():
    model = make_model(constant_gate())
    with RoutingMonitor(model) as monitor:
        for _ in range(80):
            model(torch.randn(32, P))
        with pytest.warns(StaticRoutingWarning, match="1.gates.0 is static: .* in 160 samples") as given:
            model(torch.randn(32, P))
        assert "2.00 of 4 experts per sample, 100 % of them in common" in str(given[0].message)
        assert "information=1.0" in str(given[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(200):
                model(torch.randn(32, P))
    assert monitor.statistics()["1.gates.0"]["verdict"] == "static"


def test_a_short_run_is_warned_of_at_its_end():
    given, _ = train(make_model(constant_gate()), steps=3)
    assert [type(warning) for warning in given] == [StaticRoutingWarning]


def test_a_block_that_fails_gives_no_warning_on_top():
    model = make_model(constant_gate())
    with warnings.catch_warnings(record=True) as given, suppress(KeyError), RoutingMonitor(model):
        warnings.simplefilter("always")
        model(torch.randn(32, P))
        raise KeyError
    assert given == []


def test_the_summary_is_a_table_with_a_line_per_gate():
    _, monitor = train(make_model(constant_gate()), steps=3)
    names, row = monitor.summary().splitlines()
    assert names.split()[:4] == ["gate", "verdict", "information", "selection"]
    assert row.split() == ["1.gates.0", "static", "0.00", "0.00", "2.00", "1.00", "2.00", "2"]
    assert monitor.summary(evaluation=True) == ""


def identity_model(gate):
    """The gate sees the features themselves."""
    return MoE(experts=DenseExperts(N, P, 1), gate=gate, return_routing=False)


def test_a_gate_that_sends_a_few_samples_elsewhere_is_warned_of():
    _, monitor = train(identity_model(nearly_static_gate()), steps=200, interval=1, window=200)
    statistics = monitor.statistics()["gates.0"]
    assert 0 < statistics["selection_information"] < 0.05
    assert statistics["verdict"] in ("static", "blends")
    assert statistics["dead_experts"] == [2, 3]


def test_a_gate_that_only_weighs_the_same_two_experts_is_warned_of():
    gate = TopKGate(P, N, k=2)
    with torch.no_grad():
        gate.bias[:2] = 100.0
        gate.weight[:2].normal_(generator=torch.Generator().manual_seed(0))
    given, monitor = train(identity_model(gate.requires_grad_(False)), steps=10, interval=1, window=10)
    statistics = monitor.statistics()["gates.0"]
    assert statistics["information"] > 0.1
    assert statistics["selection_information"] == 0
    assert statistics["verdict"] == "blends"
    (warning,) = given
    assert type(warning) is RoutingWarning
    assert "gate gates.0 blends: the same experts run for nearly all samples" in str(warning)
    assert "load_balance=0.01" in str(warning)


def test_a_gate_that_routes_gives_no_warning():
    given, monitor = train(make_model(TopKGate(P, N, k=2)), steps=30, interval=1, window=10)
    assert given == []
    assert monitor.statistics()["1.gates.0"]["verdict"] == "routes"


def test_a_dense_gate_gives_no_warning():
    gate = SoftmaxGate(P, N)
    nn.init.zeros_(gate.weight)
    given, monitor = train(make_model(gate), steps=10, interval=1, window=5)
    assert given == []
    assert monitor.statistics()["1.gates.0"]["verdict"] == "dense"


def test_a_gate_whose_search_is_still_soft_gives_no_warning():
    gate = PermutedGate(constant_gate(), Permutation(N, steps=100, tau=(1e-3, 1e-7)))
    given, _ = train(make_model(gate), steps=10, interval=1, window=5)
    assert given == []
    gate.search.fixed.copy_(torch.arange(N))
    for _ in range(100):
        gate.search.step()
    given, _ = train(make_model(gate), steps=10, interval=1, window=5)
    assert len(given) == 1


class HardeningGate(Gate):
    """The same for every sample: all experts in the first passes, one later."""

    def __init__(self, soft_passes):
        super().__init__()
        self.num_experts = N
        self.soft_passes = soft_passes

    def forward(self, x, keys=None, mask=None):
        self.soft_passes -= 1
        weights = torch.full((N,), 1 / N) if self.soft_passes >= 0 else torch.eye(N)[0]
        return Routing(weights=weights.expand(len(x), N))


def test_batches_that_began_soft_give_no_warning_the_next_ones_do():
    assert train(make_model(HardeningGate(3)), steps=5, interval=1)[0] == []
    assert len(train(make_model(HardeningGate(3)), steps=10, interval=1)[0]) == 1


def test_a_gate_that_is_dense_over_its_own_experts_gives_no_warning():
    gate = SubsetGate(SoftmaxGate(P, 2), experts=[0, 3], num_experts=N)
    given, monitor = train(make_model(gate), steps=5, interval=1, window=5)
    assert given == []
    assert monitor.statistics()["1.gates.0"]["verdict"] == "dense"


def test_statistics_are_those_after_a_joint_choice():
    gates = [TopKGate(P, N, k=2) for _ in range(2)]
    moe = MultiGateMoE(experts=DenseExperts(N, P, 1), gates=gates, joint=JointSelection(k_shared=1))
    mask = torch.arange(16) > 3
    with RoutingMonitor(moe, interval=1, names=["watched", "rating"]) as monitor:
        _, routings = moe(torch.randn(16, P), mask=mask)
    for statistics, routing in zip(monitor.statistics().values(), routings, strict=True):
        assert statistics["experts_per_sample"] <= 1
        assert statistics["samples"] == 12
        assert statistics["share_of_samples"] == routing.statistics()["share_of_samples"]


def test_statistics_are_those_of_the_window_and_of_the_last_evaluation():
    gate = TopKGate(P, N, k=1)
    x = torch.randn(5, 6, P)
    with RoutingMonitor(gate, interval=2, window=2) as monitor:
        for batch in x:
            gate(batch)
        assert monitor.statistics(evaluation=True) == {}
        gate.eval()
        for _ in range(2):
            gate(torch.randn(3, P))
        gate.train()
        gate(x[0])
        gate.eval()
        for batch in x:
            gate(batch)
        training, evaluation = monitor.statistics()["gate"], monitor.statistics(evaluation=True)["gate"]
    wanted = gate.train()(x[[2, 4]]).statistics() | {"verdict": "routes"}
    del wanted["execution"]
    assert training == wanted
    assert evaluation["samples"] == 30
    assert evaluation["share_of_samples"] == gate(x).statistics()["share_of_samples"]


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_works_and_is_not_monitored(make_copy):
    model, x = make_model(TopKGate(P, N)), torch.randn(6, P)
    with RoutingMonitor(model, interval=1) as monitor:
        model(x)
        copied = make_copy(model)
        torch.testing.assert_close(copied(x), model(x), rtol=0, atol=0)
    assert monitor.statistics()["1.gates.0"]["samples"] == 12


def test_a_model_saved_whole_can_be_loaded():
    model, file = make_model(TopKGate(P, N)), io.BytesIO()
    with RoutingMonitor(model):
        torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded(torch.randn(2, P)).shape == (2, 1)


def test_wrong_arguments_are_one_sentence():
    with pytest.raises(ValueError, match="Linear has none"):
        RoutingMonitor(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="interval must be an integer of at least 1, got 0"):
        RoutingMonitor(TopKGate(P, N), interval=0)
    with pytest.raises(ValueError, match="window must be an integer of at least 1, got 0"):
        RoutingMonitor(TopKGate(P, N), window=0)
    with pytest.raises(ValueError, match=r"names must be 1 different names, one per gate \(gate\), got"):
        RoutingMonitor(TopKGate(P, N), names=["a", "b"])
    with pytest.raises(ValueError, match=r"log must be a TensorBoard SummaryWriter.*got int"):
        RoutingMonitor(TopKGate(P, N), log=3)
