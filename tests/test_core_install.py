"""`pip install comet-moe`: the bounds of its dependencies, and the README's example without extras."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
OPTIONAL = (
    "pandas",
    "pyarrow",
    "pydantic",
    "yaml",
    "typer",
    "rich",
    "optuna",
    "plotly",
    "sklearn",
    "transformers",
)
TOOLS = ("docs", "release", "dev")
"""Extras for work on the project itself, whose versions constraints.txt pins."""


def test_every_lower_bound_is_the_oldest_version_that_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + [line for name in extras if name not in TOOLS for line in extras[name]]
    bounds = {
        (needed.name, *(Version(bound.version) for bound in needed.specifier if bound.operator == ">="))
        for needed in map(Requirement, lines)
        if needed.name != project["name"]
    }
    text = (ROOT / "constraints-minimum.txt").read_text(encoding="utf-8")
    pins = [line.split("==") for line in text.splitlines() if not line.startswith("#")]
    tested = {(name, Version(version)) for name, version in pins if name != "psycopg-binary"}
    assert bounds == tested


def run(*command):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=environment, cwd="/"
    )


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """The ``bin`` folder of a fresh environment that has the core alone."""
    folder = tmp_path_factory.mktemp("core")
    probe = run(
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder / "probe", "hatchling"
    )
    if probe.returncode:
        pytest.skip(f"no package index: {probe.stderr.strip().splitlines()[-1]}")
    made = run(sys.executable, "-m", "venv", folder / "env")
    assert made.returncode == 0, made.stderr
    bin_folder = folder / "env" / "bin"
    installed = run(
        bin_folder / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        ROOT / "constraints.txt",
        ROOT,
    )
    assert installed.returncode == 0, installed.stderr
    return bin_folder


@pytest.mark.slow
def test_the_core_brings_no_optional_dependency(core):
    code = f"import importlib.util as u; print([m for m in {OPTIONAL} if u.find_spec(m)])"
    assert run(core / "python", "-c", code).stdout.strip() == "[]"


@pytest.mark.slow
def test_the_example_of_the_readme_runs_on_the_core(core, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if "transformers" not in block]
    example += "print(*monitor.statistics().values())"
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    done = run(core / "python", script)
    assert done.returncode == 0, done.stderr
    assert "'verdict': 'routes'" in done.stdout


@pytest.mark.slow
def test_the_command_line_says_which_extra_it_needs(core):
    done = run(core / "comet-moe", "--help")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().splitlines() == [
        "comet-moe: the command line needs typer, which is not installed: pip install 'comet-moe[cli]'"
    ]
