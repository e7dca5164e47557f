"""What the tests of compiled loops share."""

import pytest

from comet_moe.kernels import jit


@pytest.fixture(autouse=True)
def compile_small_loops(monkeypatch):
    """The cases of these tests are small; outside of them such work is left to torch."""
    monkeypatch.setattr(jit, "SMALL_WORK", 0)
