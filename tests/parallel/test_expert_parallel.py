"""Experts on several ranks compute what one process computes: see equality_checks.py."""

import equality_checks
import pytest
from groups import run_group, shared_outcomes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session", params=[2, 4])
def outcomes(request, tmp_path_factory):
    return shared_outcomes(
        tmp_path_factory,
        f"equality-{request.param}",
        lambda folder: run_group(request.param, "equality_checks", folder),
    )


@pytest.mark.parametrize("check", equality_checks.CHECKS)
def test_ranks_compute_what_one_process_does(check, outcomes):
    assert outcomes[check] is None, outcomes[check]
