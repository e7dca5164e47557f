"""Experts on several ranks compute what one process computes, also with torch's other tools around them.

The checks are in equality_checks.py and composition_checks.py; each runs on all ranks of a group.
"""

import pytest
from all_checks import CHECKS
from groups import run_group, shared_outcomes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory):
    def of_size(size):
        return shared_outcomes(tmp_path_factory, f"{size}-ranks", lambda folder: run_group(size, folder))

    return of_size


@pytest.mark.parametrize("check", CHECKS[2])
def test_on_2_ranks(check, outcomes):
    assert outcomes(2)[check] is None, outcomes(2)[check]


@pytest.mark.parametrize("check", CHECKS[4])
def test_on_4_ranks(check, outcomes):
    assert outcomes(4)[check] is None, outcomes(4)[check]
