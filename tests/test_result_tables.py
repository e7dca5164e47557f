"""The tables on the pages of docs/results are those that committed results and commands give."""

import importlib
import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SHARED = [path.stem for path in RESULTS.glob("*.py")]
STUDIES = sorted(path.parent.name for path in RESULTS.glob("*/table.py"))


def rows_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("|") and "---" not in line]


@pytest.mark.parametrize("study", STUDIES)
def test_the_page_of_a_study_has_the_rows_of_its_table(study, monkeypatch):
    script = str(RESULTS / study / "table.py")
    monkeypatch.setattr(sys, "argv", [script])
    monkeypatch.setattr(sys, "path", [str(RESULTS), *sys.path])
    for name in SHARED:  # modules of tests may have these names
        monkeypatch.delitem(sys.modules, name, raising=False)
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    for name in SHARED:
        sys.modules.pop(name, None)
    page = (RESULTS / study / "README.md").read_text(encoding="utf-8")
    rows = rows_of(printed.getvalue())
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


def test_every_page_of_a_study_has_a_picture(frontiers):
    assert set(pages_of_studies()) <= frontiers.PAGES.keys()


@pytest.mark.parametrize("page", [*pages_of_studies(), "routing", "tables"])
def test_a_page_has_the_picture_and_the_decision_of_its_runs(frontiers, page):
    text = (RESULTS / page / "README.md").read_text(encoding="utf-8")
    for name, picture in frontiers.drawn(page):
        assert (RESULTS / page / name).read_text(encoding="utf-8") == picture
        assert f"({name})" in text or name.endswith("-dark.svg")
    assert frontiers.described(page) in text
