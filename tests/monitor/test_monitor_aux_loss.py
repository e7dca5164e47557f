"""``monitor.aux_loss`` is what plumbing by hand would add, however the training loop calls the model."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from comet_moe import MoE, MultiGateMoE, Permutation, PermutedGate, Routing, RoutingMonitor
from comet_moe.experts import DenseExperts
from comet_moe.gates import CometGate, Gate, JointSelection, TopKGate
from comet_moe.gates.losses import Regularizer

P, N = 8, 4


class Plumbed(nn.Module):
    """Two mixtures one after the other; ``routings`` of the last call, for plumbing by hand."""

    def __init__(self):
        super().__init__()
        self.first = MoE(experts=DenseExperts(N, P, P), gate=CometGate(P, N, k=2, gamma=1.0, entropy=0.5))
        gates = [PermutedGate(CometGate(P, N, entropy=0.2), Permutation(N, steps=9, zeta=0.1)) for _ in "ab"]
        self.second = MultiGateMoE(experts=DenseExperts(N, P, 1), gates=gates)

    def forward(self, x):
        y, routing = self.first(x)
        ys, routings = self.second(y)
        self.routings = [routing, *routings]
        return sum(ys).squeeze(-1)


def by_hand(model):
    return sum(routing.aux_loss for routing in model.routings)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Plumbed()


@pytest.fixture
def x():
    return torch.randn(16, P, generator=torch.Generator().manual_seed(1))


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal_gradients(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        # Three losses are added in another order: rounding of the sum alone.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_each_call_of_an_outermost_gate_counts_once(model, x):
    with RoutingMonitor(model) as monitor:
        model(x)
        assert list(monitor.gates) == ["first.gates.0", "second.gates.0", "second.gates.1"]
        torch.testing.assert_close(monitor.aux_loss, by_hand(model))
        assert monitor.aux_loss > 0


def test_a_gate_that_is_called_twice_in_one_pass_counts_twice(x):
    moe = MoE(
        experts=DenseExperts(N, P, P), gate=CometGate(P, N, gamma=1.0, entropy=0.5), return_routing=False
    )
    with RoutingMonitor(nn.Sequential(moe, nn.Tanh(), moe), interval=1) as monitor:
        first = moe.gate(x).aux_loss
        second = moe.gate(2 * x).aux_loss
        assert list(monitor.gates) == ["0.gates.0"]
        torch.testing.assert_close(monitor.aux_loss, first + second)
        assert monitor.statistics()["0.gates.0"]["samples"] == 2 * len(x)


@pytest.mark.parametrize("joint", [None, JointSelection(k_shared=2)])
def test_losses_over_all_gates_of_a_mixture_count(x, joint):
    gates = [CometGate(P, N, k=2, gamma=1.0, entropy=0.5) for _ in range(2)]
    regularizer = Regularizer(load_balance=0.3)
    moe = MultiGateMoE(experts=DenseExperts(N, P, 1), gates=gates, regularizer=regularizer, joint=joint)
    with RoutingMonitor(nn.Sequential(nn.Identity(), moe)) as monitor:
        _, routings = moe(x)
        assert list(monitor.gates) == ["1.gates.0", "1.gates.1"]
        torch.testing.assert_close(monitor.aux_loss, sum(routing.aux_loss for routing in routings))


@pytest.mark.parametrize("execution", ["dense", "sparse"])
@pytest.mark.parametrize("gamma", [1e-4, 1.0])
def test_statistics_of_every_pass_leave_the_gradients_as_they_are(x, execution, gamma):
    moe = MoE(
        experts=DenseExperts(N, P, 1),
        gate=CometGate(P, N, k=2, gamma=gamma, entropy=0.5),
        execution=execution,
    )
    mask = torch.arange(len(x)) % 3 > 0

    def run():
        moe.zero_grad()
        y, routing = moe(x, mask=mask)
        (y.square().sum() + routing.aux_loss).backward()
        return gradients(moe)

    wanted = run()
    with RoutingMonitor(moe, interval=1) as monitor:
        for ours, theirs in zip(run(), wanted, strict=True):
            assert torch.equal(ours, theirs)
        assert monitor.statistics()["gates.0"]["samples"] == int(mask.sum())  # no padding


def test_gradient_accumulation_with_evaluation_in_between_equals_plumbing_by_hand(model, x):
    batches = x.split(4)
    for batch in batches:
        (model(batch).square().mean() + by_hand(model)).div(len(batches)).backward()
    wanted = gradients(model)
    model.zero_grad()
    with RoutingMonitor(model, interval=1) as monitor:
        for batch in batches:
            y = model(batch)
            model.eval()
            model(x)
            model.train()
            with torch.no_grad():
                model(x)
            (y.square().mean() + monitor.aux_loss).div(len(batches)).backward()
    assert_equal_gradients(gradients(model), wanted)


def test_several_forward_passes_before_one_read_are_summed(model, x):
    with RoutingMonitor(model) as monitor:
        model(x)
        wanted = by_hand(model)
        model(-x)
        torch.testing.assert_close(monitor.aux_loss, wanted + by_hand(model))


def test_a_loss_per_forward_pass_has_the_losses_of_its_own_pass(model, x):
    with RoutingMonitor(model) as monitor:
        model(x)
        first, wanted = monitor.aux_loss, by_hand(model)
        model(-x)
        torch.testing.assert_close(first, wanted)
        torch.testing.assert_close(monitor.aux_loss, by_hand(model))


def test_reading_twice_gives_the_same_and_after_the_backward_pass_only_the_value(model, x):
    with RoutingMonitor(model) as monitor:
        loss = model(x).mean() + monitor.aux_loss
        assert monitor.aux_loss is monitor.aux_loss
        value = monitor.aux_loss.item()
        loss.backward()
        assert not monitor.aux_loss.requires_grad
        assert monitor.aux_loss.item() == value


def test_it_can_be_read_after_the_backward_pass_of_the_other_losses(model, x):
    (model(x).mean() + by_hand(model)).backward()
    wanted = gradients(model)
    model.zero_grad()
    with RoutingMonitor(model) as monitor:
        model(x).mean().backward(retain_graph=True)
        monitor.aux_loss.backward()
    assert_equal_gradients(gradients(model), wanted)


def test_without_a_training_pass_it_is_zero(model, x):
    with RoutingMonitor(model) as monitor:
        model.eval()(x)
        assert monitor.aux_loss == 0


class Remembering(nn.Identity):
    """Has weak references to the outputs of all calls; a graph that is alive keeps them alive."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def forward(self, x):
        y = x.clone()
        self.outputs.append(weakref.ref(y))
        return y

    def alive(self):
        gc.collect()
        return sum(output() is not None for output in self.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("is_read", [True, False])
def test_no_graph_is_kept(x, is_read):
    remembering = Remembering()
    moe = MoE(experts=DenseExperts(N, P, 1), gate=CometGate(P, N, entropy=0.5), return_routing=False)
    model = nn.Sequential(nn.Linear(P, P), remembering, moe)
    with RoutingMonitor(model, interval=1) as monitor:
        for _ in range(5):
            loss = model(x).mean()
            if is_read:
                loss = loss + monitor.aux_loss
            loss.backward()
            del loss
        # What was not read waits for the next training pass; autograd has freed what it saved.
        assert len(monitor._losses._waiting) == (0 if is_read else 1)
        if is_read:
            assert remembering.alive() == 0
    assert remembering.alive() == 0


class ParameterGate(Gate):
    """Its weights are a parameter, and its auxiliary loss is another."""

    def __init__(self):
        super().__init__()
        self.num_experts = N
        self.table = nn.Parameter(torch.eye(N))
        self.loss = nn.Parameter(torch.ones(()))

    def forward(self, x, keys=None, mask=None):
        return Routing(weights=self.table, aux_loss=self.loss)


def test_no_hook_stays_on_a_parameter(x):
    gate = ParameterGate()
    with RoutingMonitor(gate) as monitor:
        for _ in range(3):
            (gate(x[:N]).weights.square().sum() + monitor.aux_loss).backward()
    assert not gate.table._backward_hooks
    assert not gate.loss._backward_hooks
    assert gate.loss.grad == 3


@pytest.mark.parametrize("interval", [1, 2])
def test_what_checkpointing_computes_again_does_not_count(model, x, interval):
    (model(x).square().mean() + by_hand(model)).backward()
    wanted = gradients(model)
    model.zero_grad()
    with RoutingMonitor(model, interval=interval) as monitor:
        y = checkpoint(model, x, use_reentrant=False)
        (y.square().mean() + monitor.aux_loss).backward()
        assert_equal_gradients(gradients(model), wanted)
        assert not monitor._losses._waiting
        assert monitor.statistics()["first.gates.0"]["samples"] == len(x)


def test_reentrant_checkpointing_is_refused_where_an_auxiliary_loss_would_be_lost(model, x):
    x.requires_grad_()
    with RoutingMonitor(model, interval=1) as monitor:
        y = checkpoint(model, x, use_reentrant=True)
        y.square().mean().backward()  # a monitor of statistics alone
        assert monitor.statistics()["first.gates.0"]["samples"] == len(x)
        y = checkpoint(model, x, use_reentrant=True)
        loss = y.square().mean() + monitor.aux_loss
        with pytest.raises(RuntimeError, match=r"first\.gates\.0|second\.gates.*set use_reentrant=False"):
            loss.backward()


def test_hooks_are_removed_at_the_end_also_after_an_error(model, x):
    monitor = RoutingMonitor(model)
    with pytest.raises(ValueError, match="features"), monitor:
        model(x[:, :3])
    assert not any(module._forward_hooks for module in model.modules())
    model(x)
    assert monitor.aux_loss == 0


def test_a_monitor_in_use_cannot_be_entered_again(model):
    with RoutingMonitor(model) as monitor, pytest.raises(ValueError, match="already in use"):
        monitor.__enter__()


@pytest.mark.slow
def test_a_compiled_model_has_the_same_losses(x):
    gate = TopKGate(P, N, k=2)
    gate.register_forward_hook(lambda gate, args, routing: setattr(routing, "_aux_loss", gate.weight.sum()))
    moe = MoE(experts=DenseExperts(N, P, 1), gate=gate, return_routing=False, execution="dense")
    torch.compiler.reset()  # graphs of other tests have no hooks, and torch does not notice new ones
    compiled = torch.compile(moe, backend="aot_eager")
    with RoutingMonitor(moe, interval=1) as monitor:
        for passes in (1, 2):
            (compiled(x).mean() + monitor.aux_loss).backward()
            torch.testing.assert_close(monitor.aux_loss, gate.weight.sum().detach())
            assert monitor.statistics()["gates.0"]["samples"] == passes * len(x)


def test_a_model_whose_gates_are_not_called_is_warned_of_once(model, x):
    with RoutingMonitor(model) as monitor:
        with pytest.warns(UserWarning, match="no gate was called since the monitor was entered"):
            assert monitor.aux_loss == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert monitor.aux_loss == 0


def test_a_gate_that_is_the_model_is_named_gate(x):
    gate: Gate = TopKGate(P, N)
    with RoutingMonitor(gate, interval=1) as monitor:
        gate(x)
    assert list(monitor.statistics()) == ["gate"]
