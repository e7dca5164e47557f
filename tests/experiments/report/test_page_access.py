"""The page for keyboards, screen readers and large studies; its first lines answer the first questions."""

import html
import re

import pytest
from browser import serious_findings
from studies import write_study

from comet_moe.experiments.report import write_report


def opening(file):
    """The text above the first table."""
    text = html.unescape(file.read_text(encoding="utf-8"))
    answer = text.partition('id="study-1-answer"')[2].partition("<table")[0]
    return " ".join(re.sub(r"<[^>]+>", " ", answer).split())


def test_the_summary_says_which_gate_how_sure_and_whether_it_routes(tmp_path):
    folder = write_study(tmp_path / "study", gates=("dense", "topk"), trials=6, kind="ablation")
    text = opening(write_report([folder], tmp_path / "page.html"))
    assert re.search(r"Use (dense|topk): it", text)
    assert "Does it route? topk: routes, other samples run other experts." in text
    assert "What does it cost? Operations per sample: dense " in text
    assert "Does a mixture pay on this data?" in text


def test_a_single_run_is_compared_with_nothing_and_has_no_plot_of_one_point(tmp_path):
    folder = write_study(tmp_path / "study", gates=("comet",), trials=1, kind="ablation")
    file = write_report([folder], tmp_path / "page.html")
    assert "lowest validation loss of 1, and nothing else was trained." in opening(file)
    assert "Test loss by cost" not in file.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_text_is_painted_before_the_plotting_library_runs(page, tmp_path):
    folder = write_study(tmp_path / "study", gates=("dense", "topk"), trials=3, kind="ablation")
    page.open(write_report([folder], tmp_path / "page.html"))
    page.wait_for("performance.getEntriesByName('first-contentful-paint').length")
    assert page.run("return document.getElementById('plotly').type") == "text/plain"
    page.scroll_to_all()
    assert page.run("return typeof Plotly") == "object"
    assert all(marks for _, marks in page.marks())


@pytest.mark.slow
def test_the_range_of_losses_keeps_a_curve_that_rises_again(page, study_page):
    page.open(study_page)
    low, high = page.run("return rangeWithoutFirstEpochs([[90, 40, 26.1, 26.5, 26.08, 26.6]])")
    assert low < 26.08
    assert 26.6 < high < 45


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_serious(page, study_page, dark):
    page.open(study_page, dark=dark).scroll_to_all()
    assert serious_findings(page) == []
    assert page.console_messages() == []


@pytest.mark.slow
def test_a_study_of_500_trials_per_gate_opens_in_two_seconds(page, tmp_path):
    folder = write_study(
        tmp_path / "study", gates=("softmax", "topk", "topk+", "comet", "comet+"), trials=500
    )
    file = write_report([folder], tmp_path / "page.html")
    # Time of the main thread until the page is loaded: wall-clock time is that of other processes too.
    page.command("Performance.enable", timeDomain="threadTicks")
    page.open(file)
    metrics = page.command("Performance.getMetrics")["metrics"]
    seconds = {metric["name"]: metric["value"] for metric in metrics}["TaskDuration"]
    assert page.run("return document.readyState") == "complete"
    assert seconds < 2
