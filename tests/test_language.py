"""Plain technical English: words that readers had to guess at do not come back."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SUFFIXES = {".py", ".md", ".yaml", ".html", ".js", ".css", ".sh", ".toml"}

UNITS = (
    "batch|epoch|expert|gate|layer|line|page|row|run|sample|second|selector|step|study|task|token|tree|trial"
)
AVOID = {
    rf"\b(one|an?) \w+ an? ({UNITS})\b": "per",
    r"\bfigures?\b": "metrics or results",
    r"\blaid over\b|\blays? \w+ \w+ over\b": "override",
    r"\bgo(es)? on with\b|\bgone on with\b|\bto go on\b": "resume",
    r"\bat hand\b": "available",
    r"\bnobody\b": "the plain condition",
    r"\bis no number\b": "NaN",
    r"\bbudget buys\b": "loss by number of trials",
    r"\bpenalt(y|ies)\b": "auxiliary loss",
    r"\b(Lesson|Fitting|Watch|GateAround|nobody_looks)\b": "the plain name",
}
ALLOWED = {"tests/test_language.py", "CHANGELOG.md", "tests/gates/test_golden.py"}
PLOTS = ("src/comet_moe/report/", "tests/report/")  # a figure is an HTML element there


def tracked_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout, so that the files of the project are not known")
    names = [name for name in listed.stdout.splitlines() if Path(name).suffix in SUFFIXES]
    return [name for name in names if name not in ALLOWED and (ROOT / name).exists()]


@pytest.mark.parametrize("pattern", AVOID)
def test_no_file_uses_words_of_the_old_dialect(pattern):
    search = re.compile(pattern, re.IGNORECASE)
    found = [
        f"{name}:{number}: {line.strip()}"
        for name in tracked_files()
        if not ("figure" in pattern and name.startswith(PLOTS))
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), start=1)
        if search.search(line)
    ]
    assert not found, f"say {AVOID[pattern]}:\n" + "\n".join(found)
