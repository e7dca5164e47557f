"""The tables on the pages of docs/results are those that committed results and commands give."""

import importlib
import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
DRAWINGS = ROOT / "docs" / "drawings"
SHARED = [path.stem for folder in (RESULTS, DRAWINGS) for path in folder.glob("*.py")]
STUDIES = sorted(path.parent.name for path in RESULTS.glob("*/table.py"))


def rows_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("|") and "---" not in line]


@pytest.fixture
def run_script(monkeypatch, tmp_path):
    """Run a script of docs/results; what it printed."""

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        monkeypatch.setattr(sys, "path", [str(RESULTS), *sys.path])
        for name in SHARED:  # modules of tests may have these names
            monkeypatch.delitem(sys.modules, name, raising=False)
        with redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(script), run_name="__main__")
        for name in SHARED:
            sys.modules.pop(name, None)
        return printed.getvalue()

    return run


@pytest.mark.parametrize("study", STUDIES)
def test_the_page_of_a_study_has_the_rows_of_its_table(study, run_script):
    rows = rows_of(run_script(RESULTS / study / "table.py"))
    page = (RESULTS / study / "README.md").read_text(encoding="utf-8")
    assert rows
    assert [row for row in rows if row not in page] == []


def test_the_page_of_unseen_tables_has_the_rows_of_its_script(run_script):
    rows = rows_of(run_script(RESULTS / "tables" / "unseen.py"))
    page = (RESULTS / "tables" / "unseen.md").read_text(encoding="utf-8")
    assert rows
    assert [row for row in rows if row not in page] == []


@pytest.fixture(scope="module")
def frontiers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(RESULTS), *sys.path])
        for name in SHARED:
            patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module("frontiers")
        for name in SHARED:
            sys.modules.pop(name, None)


def pages_of_studies():
    return sorted({path.relative_to(RESULTS).parts[0] for path in RESULTS.rglob("study.json")})


def test_the_first_tutorial_has_what_the_committed_comparison_prints(capsys):
    runpy.run_path(str(RESULTS / "digits" / "show.py"), run_name="__main__")
    page = (ROOT / "docs" / "tutorials" / "own-table.md").read_text(encoding="utf-8")
    assert f"```text\n{capsys.readouterr().out}```" in page


def test_every_page_of_a_study_has_a_picture(frontiers):
    assert set(pages_of_studies()) <= frontiers.PAGES.keys()


@pytest.mark.parametrize("page", [*pages_of_studies(), "routing", "tables", "verdicts"])
def test_a_page_has_the_picture_and_the_decision_of_its_runs(frontiers, page):
    text = (RESULTS / page / "README.md").read_text(encoding="utf-8")
    for name, picture in frontiers.drawn(page):
        assert (RESULTS / page / name).read_text(encoding="utf-8") == picture
        assert f"({name})" in text or name.endswith("-dark.svg")
    assert frontiers.described(page) in text


def test_the_summary_and_readme_have_the_rows_and_the_plot_of_committed_runs(run_script, tmp_path):
    rows = rows_of(run_script(RESULTS / "summary.py", tmp_path))
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/results/", "](results/")
    assert len(rows) == 7  # the heads, and six studies
    assert [row for row in rows if row not in page or row not in readme] == []
    plots = list(tmp_path.iterdir())
    assert len(plots) == 2
    for plot in plots:
        assert (DRAWINGS / plot.name).read_text(encoding="utf-8") == plot.read_text(encoding="utf-8")
