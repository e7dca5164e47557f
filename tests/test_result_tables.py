"""The tables on the pages of docs/results are those that committed results and commands give."""

import subprocess
import sys
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[1] / "docs" / "results"
STUDIES = sorted(path.parent.name for path in RESULTS.glob("*/table.py"))


def rows_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("|") and "---" not in line]


@pytest.mark.parametrize("study", STUDIES)
def test_the_page_of_a_study_has_the_rows_of_its_table(study):
    script = RESULTS / study / "table.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    page = (RESULTS / study / "README.md").read_text(encoding="utf-8")
    rows = rows_of(done.stdout)
    assert rows
    assert [row for row in rows if row not in page] == []
