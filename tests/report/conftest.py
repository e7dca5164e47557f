"""What the tests of the report share: a browser, pages of drawn studies, and real runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from browser import Page, start
from studies import add_runs, write_study

from comet_moe.report import write_report


@pytest.fixture(scope="session")
def driver():
    found = start()
    yield found
    found.quit()


@pytest.fixture
def page(driver):
    return Page(driver)


@pytest.fixture(scope="session")
def real_runs(tmp_path_factory):
    """Run folders of two gates, trained as a user trains them."""
    folder = tmp_path_factory.mktemp("real")
    for gate in ("topk", "comet+"):
        settings = (f"gate={gate}", "training.epochs=3", "search.epochs=2", "training.threads=1")
        options = [part for setting in settings for part in ("--set", setting)]
        subprocess.run(
            [sys.executable, "-m", "comet_moe", "train", "multidigits", *options, "--out", folder / gate],
            check=True,
            capture_output=True,
            env=os.environ | {"COMET_MOE_CACHE": str(folder.parent / "cache"), "OMP_NUM_THREADS": "1"},
        )
    return folder


@pytest.fixture(scope="session")
def real_page(real_runs, tmp_path_factory):
    return write_report([real_runs], tmp_path_factory.mktemp("pages") / "real.html")


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    """A tuning study that is not finished, with failures, and the folders of some of its runs."""
    folder = tmp_path_factory.mktemp("studies") / "tuning"
    gates = ("softmax", "topk", "topk+", "comet", "comet+")
    return add_runs(write_study(folder, gates=gates, trials=24, failed=2, unfinished=3), per_gate=24)


@pytest.fixture(scope="session")
def study_page(study, tmp_path_factory):
    return write_report([study], tmp_path_factory.mktemp("pages") / "study.html")
