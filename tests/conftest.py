"""What several tests share."""

import os

# Some virtual machines report matrix tiles (AMX), and end a process that uses them. Before torch is loaded.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import HealthCheck, settings

from comet_moe.gates import registry

pytest_plugins = ["hosts", "storages"]
settings.register_profile("ci", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # two workers on two cores


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _forget_own_gates():
    """Forget gates that a test registers; those of the library stay."""
    yield
    for name in set(registry._registered) - set(registry._MODULES):
        del registry._registered[name]
