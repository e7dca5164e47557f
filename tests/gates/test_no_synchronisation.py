"""No gate reads values where that would make an accelerator wait for the host.

``FakeTensorMode`` raises wherever values are read, so it stands for the accelerator.
"""

import pytest
import torch
from all_gates import GATES, N, P, keys_of
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from comet_moe import checks
from comet_moe.gates import CometGate


def test_the_mode_sees_a_value_that_is_read():
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.ones(3).sum().item()


CASES = [  # every two values of different arguments occur together
    (True, True, True, None),
    (False, False, False, None),
    (True, True, False, True),
    (False, False, True, True),
    (True, False, True, False),
    (False, True, False, False),
]


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize(("training", "grad", "masked", "value_checks"), CASES)
def test_gates_read_no_values(name, training, grad, masked, value_checks, request):
    checks.set_value_checks(value_checks)
    request.addfinalizer(lambda: checks.set_value_checks(None))
    with FakeTensorMode(), torch.set_grad_enabled(grad):
        gate, x = GATES[name]().train(training), torch.randn(4, 5, P)
        mask = torch.ones(4, 5, dtype=torch.bool) if masked else None
        routing = gate(x, keys=keys_of(x), mask=mask)
        assert routing.weights.shape == (4, 5, N)
        assert routing.aux_loss.shape == ()


@pytest.mark.parametrize("name", GATES)
def test_gradients_read_no_values(name):
    with FakeTensorMode():
        gate, x = GATES[name](), torch.randn(4, P, requires_grad=True)
        routing = gate(x, keys=keys_of(x))
        loss = routing.weights.square().sum() + routing.aux_loss
        if loss.requires_grad:
            loss.backward()


def test_operations_of_fake_tensors_are_counted_as_if_every_node_were_visited():
    with FakeTensorMode(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        gate = CometGate(P, N, k=2).eval()
        gate(torch.randn(4, P))
    assert counter.get_total_flops() == 4 * gate.flops()


def test_values_are_checked_on_the_cpu_unless_asked_otherwise(monkeypatch):
    here, elsewhere = torch.ones(2), torch.ones(2, device="meta")
    monkeypatch.setattr(checks, "is_plain_eager", lambda tensor: True)  # as if meta were an accelerator
    try:
        for setting, wanted in ((None, (True, False)), (True, (True, True)), (False, (False, False))):
            checks.set_value_checks(setting)
            assert (checks.should_check_values(here), checks.should_check_values(elsewhere)) == wanted
    finally:
        checks.set_value_checks(None)


def test_checks_switched_off_for_a_block_come_back():
    for setting in (None, True, False):
        checks.set_value_checks(setting)
        with checks.without_value_checks():
            assert not checks.should_check_values(torch.ones(2))
        assert checks.should_check_values(torch.ones(2)) == (setting is not False)
    checks.set_value_checks(None)
