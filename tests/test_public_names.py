"""The names that ``import comet_moe`` offers, without torch until one of them is used."""

import importlib
import subprocess
import sys
from types import ModuleType

import pytest

import comet_moe

NAMES = {
    "CometError",
    "LazyAdam",
    "MoE",
    "MultiGateMoE",
    "Permutation",
    "PermutedGate",
    "Routing",
    "RoutingMonitor",
    "RoutingWarning",
    "StaticRoutingWarning",
    "grow",
    "intervene",
    "parameter_groups",
    "record",
    "replay",
    "routing_gain",
    "set_value_checks",
    "sinkhorn",
    "step",
}


def test_every_public_name_is_there():
    assert set(comet_moe.__all__) == NAMES
    for name in NAMES:
        assert getattr(comet_moe, name).__name__ == name
        assert name in dir(comet_moe)


@pytest.mark.slow
def test_packages_need_no_import_of_their_own():
    code = "import comet_moe; print(comet_moe.kernels.status()); comet_moe.gates.CometGate"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "numba: " in done.stdout


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'comet_moe' has no attribute 'Moe'"):
        _ = comet_moe.Moe


def test_importing_the_package_does_not_import_torch():
    code = "import sys, comet_moe; comet_moe.CometError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_sinkhorn_is_a_function_of_the_package_and_a_module_of_local_search():
    module = importlib.import_module("comet_moe.local_search.sinkhorn")
    assert isinstance(module, ModuleType)
    assert sys.modules["comet_moe.local_search"].sinkhorn is module
    assert comet_moe.sinkhorn is module.sinkhorn


def test_audit_is_a_package_that_can_be_called():
    importlib.import_module("comet_moe.audit.findings")
    assert isinstance(comet_moe.audit, ModuleType)
    with pytest.raises(ValueError, match="batches is empty"):
        comet_moe.audit(importlib.import_module("torch").nn.Linear(1, 1), [], None)
