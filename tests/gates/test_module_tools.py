"""What torch and other libraries do to modules acts on gates too, also in evaluation without gradients."""

import copy
import gc
import pickle
import types
import weakref

import pytest
import torch
from all_gates import GATES, N, P, keys_of
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import weight_norm as old_weight_norm

from comet_moe import Routing
from comet_moe.gates import CometGate


def evaluate(gate, x):
    """Weights in evaluation without gradients; for a CometGate, by the descent."""
    gate.eval()
    with torch.no_grad():
        return gate(x, keys=keys_of(x)).weights


def new_gate():
    gate = CometGate(P, N, k=2, gamma=1.0)
    nn.init.normal_(gate.split_weight)
    nn.init.normal_(gate.leaf_weight)
    return gate


def assert_weights_of(gate, wanted, x):
    """The descent of ``gate`` has the weights of a gate with the parameters ``wanted``."""
    plain = new_gate()
    plain.load_state_dict({name: value.detach().clone() for name, value in wanted.items()})
    with torch.enable_grad():
        dense = plain.eval()(x).weights.detach()  # with gradients: every node is evaluated
    torch.testing.assert_close(evaluate(gate, x), dense)


class Negated(nn.Module):
    def forward(self, weight):
        return -weight


@pytest.mark.parametrize("name", ["split_weight", "split_bias", "leaf_weight", "leaf_bias"])
def test_parametrizations_are_evaluated(name):
    gate, x = new_gate(), torch.randn(20, P)
    wanted = gate.state_dict()
    wanted[name] = -wanted[name]
    parametrize.register_parametrization(gate, name, Negated())
    assert_weights_of(gate, wanted, x)


def test_weight_norm_old_and_new_is_evaluated():
    for weight_norm in (old_weight_norm, parametrizations.weight_norm):
        gate, x = new_gate(), torch.randn(20, P)
        wanted = gate.state_dict()
        weight_norm(gate, "leaf_weight")
        assert_weights_of(gate, wanted, x)
        scale = next(p for name, p in gate.named_parameters() if name.endswith(("_g", "original0")))
        with torch.no_grad():
            scale.mul_(3)
        wanted["leaf_weight"] = 3 * wanted["leaf_weight"]
        assert_weights_of(gate, wanted, x)


def test_pruned_parameters_are_evaluated():
    gate, x = new_gate(), torch.randn(20, P)
    wanted = gate.state_dict()
    prune.l1_unstructured(gate, "split_weight", amount=0.5)
    wanted["split_weight"] = wanted["split_weight"] * gate.split_weight_mask
    assert (gate.split_weight_mask == 0).any()
    assert_weights_of(gate, wanted, x)


def test_a_parameter_may_change_its_strides_in_place():
    gate, x = new_gate(), torch.randn(20, P)
    evaluate(gate, x)
    address = gate.leaf_weight.data_ptr()
    gate.leaf_weight.data = gate.leaf_weight.data.as_strided((2, N, P), (1, 2, 2 * N))
    assert gate.leaf_weight.data_ptr() == address
    assert_weights_of(gate, gate.state_dict(), x)


def test_nothing_keeps_parameters_alive_that_were_replaced():
    gate = new_gate()
    evaluate(gate, torch.randn(2, P))
    old = weakref.ref(gate.leaf_weight)
    gate.leaf_weight = nn.Parameter(torch.randn(2, N, P))
    gc.collect()
    assert old() is None


def test_a_copied_gate_has_parameters_of_its_own():
    gate, x = new_gate(), torch.randn(20, P)
    before = evaluate(gate, x)
    for copied in (copy.deepcopy(gate), pickle.loads(pickle.dumps(gate))):
        with torch.no_grad():
            copied.split_weight.neg_()
        assert not torch.equal(evaluate(copied, x), before)
        torch.testing.assert_close(evaluate(gate, x), before)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_hooks_are_called(name, training, grad):
    gate, x = GATES[name]().train(training), torch.randn(3, P)
    calls = []
    handles = [
        gate.register_forward_pre_hook(lambda module, args: calls.append("pre-hook")),
        gate.register_forward_hook(lambda module, args, output: calls.append("hook")),
        nn.modules.module.register_module_forward_pre_hook(lambda module, args: calls.append("global pre")),
        nn.modules.module.register_module_forward_hook(lambda module, args, out: calls.append("global")),
    ]
    try:
        with torch.set_grad_enabled(grad):
            gate(x, keys=keys_of(x))
    finally:
        for handle in handles:
            handle.remove()
    assert sorted(calls) == ["global", "global pre", "hook", "pre-hook"]


@pytest.mark.parametrize("name", GATES)
def test_hooks_may_change_input_and_output(name):
    gate, x = GATES[name](), torch.randn(3, P)
    gate.register_forward_hook(lambda module, args, routing: Routing(weights=2 * routing.weights))
    assert (evaluate(gate, x).sum(-1) > 1).any()
    if name != "hash":
        other = GATES[name]()
        other.load_state_dict(gate.state_dict())
        other.register_forward_pre_hook(lambda module, args: (-args[0],))
        torch.testing.assert_close(2 * evaluate(other, x), evaluate(gate, -x))


@pytest.mark.parametrize("name", GATES)
def test_a_replaced_forward_is_called(name):
    gate, x = GATES[name](), torch.randn(3, P)
    plain = gate.forward

    def wrapper(self, *args, **kwargs):
        return Routing(weights=2 * plain(*args, **kwargs).weights)

    before = evaluate(gate, x)
    gate.forward = types.MethodType(wrapper, gate)
    torch.testing.assert_close(evaluate(gate, x), 2 * before)


@pytest.mark.parametrize("name", GATES)
def test_the_forward_of_a_subclass_is_called(name):
    gate, x = GATES[name](), torch.randn(3, P)
    before = evaluate(gate, x)

    class Doubled(type(gate)):
        def forward(self, x, keys=None, mask=None):
            return Routing(weights=2 * super().forward(x, keys=keys, mask=mask).weights)

    gate.__class__ = Doubled
    torch.testing.assert_close(evaluate(gate, x), 2 * before)


@pytest.mark.parametrize("name", GATES)
def test_lazily_negated_inputs_and_parameters_have_their_values(name):
    gate, x = GATES[name](), torch.randn(5, P, dtype=torch.complex64)
    lazy = x.conj().imag
    assert lazy.is_neg()
    torch.testing.assert_close(evaluate(gate, lazy), evaluate(gate, lazy.resolve_neg()))
    gate.train()
    torch.manual_seed(1)
    trained = gate(lazy, keys=keys_of(lazy)).weights
    torch.manual_seed(1)
    torch.testing.assert_close(trained, gate(lazy.resolve_neg(), keys=keys_of(lazy)).weights)
    for own in gate.parameters():
        before = evaluate(gate, x.real)
        own.data = torch.complex(torch.zeros_like(own), -own.detach()).conj().imag
        assert own.is_neg()
        torch.testing.assert_close(evaluate(gate, x.real), before)


@pytest.mark.parametrize("name", GATES)
def test_gates_compute_in_float64_if_they_are(name):
    gate, x = GATES[name]().double(), torch.randn(3, P, dtype=torch.float64)
    assert gate(x, keys=keys_of(x)).weights.dtype == torch.float64
    assert evaluate(gate, x).dtype == torch.float64


@pytest.mark.parametrize("name", GATES)
def test_gates_run_on_the_meta_device(name):
    gate, x = GATES[name]().to("meta"), torch.randn(3, P, device="meta")
    assert gate(x, keys=keys_of(x)).weights.is_meta
    assert evaluate(gate, x).shape == (3, N)
