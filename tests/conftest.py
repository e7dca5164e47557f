"""What several tests share."""

import os
from pathlib import Path

# Some virtual machines report matrix tiles (AMX), and end a process that uses them. Before torch is loaded.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import HealthCheck, settings

import forked
from comet_moe.experiments.studies import pool
from comet_moe.gates import registry
from comet_moe.kernels import jit

pytest_plugins = ["hosts", "storages"]
settings.register_profile("ci", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # two workers on two cores


COMPILED = ("experts", "gates", "kernels", "local_search", "mixture")
"""Folders whose tests run compiled loops on small tensors too, which torch's operators would take."""


@pytest.fixture(autouse=True)
def _compiled_loops(request, monkeypatch):
    if request.path.relative_to(Path(__file__).parent).parts[0] in COMPILED:
        monkeypatch.setattr(jit, "SMALL_WORK", 0)


@pytest.fixture(autouse=True, scope="session")
def _forked_workers():
    """Workers of studies in this process are forked; those of studies in child processes are spawned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "multiprocessing", forked.Workers)
        yield


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _forget_own_gates():
    """Forget gates that a test registers; those of the library stay."""
    yield
    for name in set(registry._registered) - set(registry._MODULES):
        del registry._registered[name]
