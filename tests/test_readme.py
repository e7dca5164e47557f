"""What README shows runs as it is, and prints what README says: the comparison, the audit, the model."""

import contextlib
import io
import re
import runpy
import shlex
from pathlib import Path

import pandas as pd
import pytest
from command import comet_moe, succeed

from pages import commands, commands_to_run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DRAWINGS = ROOT / "docs" / "drawings"
QUICK = ("--set", "training.epochs=1", "--seeds", "1", "--gates", "dense,comet", "--workers", "1")
MOST_LINES = 201
"""One screen and a half of prose, with the outputs."""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def run(block):
    """What a block of Python prints, and the names that it defines."""
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, "README.md", "exec"), names)
    return printed.getvalue(), names


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMET_MOE_CACHE", str(tmp_path / "cache"))


def test_it_stays_short():
    assert len(README.splitlines()) <= MOST_LINES


def test_the_first_block_has_the_two_commands_that_set_up_a_clone():
    assert [line.split("#")[0].strip() for line in blocks("")[0].splitlines()] == ["make demo", "make test"]


@pytest.mark.slow
def test_the_table_is_made_compared_and_predicted():
    made, compared, predicted = (shlex.split(command) for command in list(commands("README.md"))[3:6])
    assert made[:2] == ["python", "-c"]
    exec(compile(made[2], "README.md", "exec"), {})
    pd.read_csv("digits.csv").head(300).to_csv("digits.csv", index=False)
    assert "No verdict: " in succeed(*compared[1:], *QUICK).out  # fewer epochs, seeds, gates and rows
    assert re.search(
        r"using .*(dense-000|comet-000|linear\.skops|lightgbm\.skops)", succeed(*predicted[1:]).err
    )
    assert len(pd.read_csv("predictions.csv")) == 300


def test_the_comparison_and_its_picture_are_those_of_the_committed_demo():
    script = runpy.run_path(str(DRAWINGS / "demo.py"))
    table = script["read_table"]()
    assert script["show"](table) + "\n" == blocks("text")[0]
    for name, drawn in script["draw"](table).items():
        assert (DRAWINGS / name).read_text(encoding="utf-8") == drawn


def test_the_audit_finds_what_readme_shows():
    pytest.importorskip("transformers")
    runpy.run_path(str(ROOT / "examples" / "idle_router.py"))
    (command,) = (line for line in commands_to_run("README.md") if line[:2] == ["comet-moe", "audit"])
    printed = succeed(*command[1:]).out
    codes = re.findall(r"^- ([\w-]+):", blocks("text")[1], re.MULTILINE)
    assert codes
    assert codes == re.findall(r"^- ([\w-]+):", printed, re.MULTILINE)


def test_the_model_with_a_monitor_prints_the_verdict_that_readme_shows():
    printed, _ = run(blocks("python")[0])
    verdict = re.compile(r"(\S+): (\w+), [\d.]+ experts per sample\n")
    assert verdict.fullmatch(printed)
    assert verdict.fullmatch(printed).groups() == verdict.fullmatch(blocks("text")[2]).groups()


def test_a_study_without_weights_is_refused_in_one_sentence():
    done = comet_moe("predict", ROOT / "docs" / "results" / "multidigits", "new.csv", "-o", "predictions.csv")
    assert done.code == 2
    assert "multidigits has no finished run with weights on this machine" in done.err


def test_every_gate_is_in_the_table_of_gates():
    from comet_moe import gates

    page = (ROOT / "docs" / "gates.md").read_text(encoding="utf-8")
    for name in gates.__all__:
        if name.endswith("Gate") and name not in ("Gate", "GateWrapper"):
            assert re.search(rf"`{name}[`(]", page), name


def test_readme_counts_the_published_gates_of_the_table():
    """Each row of the table of gates has a reference, but for variants of one gate and for no gate."""
    page = (ROOT / "docs" / "gates.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if re.match(r"\| `\w+(Gate)", line)]
    published = [row for row in rows if len(row) > 3 and re.search(r"\d{4}", row[3])]
    assert len(published) == 10
    assert "Ten published gates" in README


def test_the_package_and_the_module_have_the_same_version():
    from importlib.metadata import version

    import comet_moe as package

    assert package.__version__ == version("comet-moe")
