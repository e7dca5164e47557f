"""Fixtures of the report's tests: a browser, random studies, trained runs, and their pages."""

import pytest
from browser import Page, start_browser
from command import succeed
from studies import add_runs, write_run, write_study

from comet_moe.experiments.report import write_report


@pytest.fixture(scope="session")
def driver():
    browser = start_browser()
    yield browser
    browser.quit()


@pytest.fixture
def page(driver):
    return Page(driver)


@pytest.fixture(scope="session")
def trained_runs(tmp_path_factory):
    """Run folders of two gates, from the command line."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMET_MOE_CACHE", str(folder.parent / "cache"))
        for gate in ("topk", "comet+"):
            settings = (f"gate={gate}", "training.epochs=3", "search.epochs=2", "training.threads=1")
            options = [part for setting in settings for part in ("--set", setting)]
            succeed("train", "multidigits", *options, "--out", folder / gate)
    return folder


@pytest.fixture(scope="session")
def trained_page(trained_runs, tmp_path_factory):
    return write_report([trained_runs], tmp_path_factory.mktemp("pages") / "trained.html")


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Folder with random runs of two gates."""
    folder = tmp_path_factory.mktemp("runs")
    for gate in ("topk", "comet+"):
        write_run(folder / gate, gate)
    return folder


@pytest.fixture(scope="session")
def runs_page(runs, tmp_path_factory):
    return write_report([runs], tmp_path_factory.mktemp("pages") / "runs.html")


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    """A tuning study that is not finished, with failed trials and all run folders."""
    folder = tmp_path_factory.mktemp("studies") / "tuning"
    gates = ("softmax", "topk", "topk+", "comet", "comet+")
    return add_runs(write_study(folder, gates=gates, trials=24, failed=2, unfinished=3), per_gate=24)


@pytest.fixture(scope="session")
def study_page(study, tmp_path_factory):
    return write_report([study], tmp_path_factory.mktemp("pages") / "study.html")
