"""`pip install comet-moe` without extras: what it brings, and that the README's example runs on it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
