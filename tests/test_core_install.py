"""`pip install comet-moe`: the bounds of its dependencies, and the README's example without extras."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
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


def core():
    """Names of the distributions that `pip install comet-moe` brings, extras of dependencies included."""
    found, waiting = set(), [Requirement("comet-moe")]
    while waiting:
        needed = waiting.pop()
        key = (canonicalize_name(needed.name), frozenset(needed.extras))
        if key in found:
            continue
        try:
            lines = requires(needed.name) or []
        except PackageNotFoundError:  # for another platform
            continue
        found.add(key)
        for line in map(Requirement, lines):
            extras = needed.extras or {""}
            if line.marker is None or any(line.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(line)
    return {name for name, _ in found}


ON_THE_CORE = """
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
MISSING = frozenset({missing!r})

class CoreFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, *arguments):
        return None if name.partition(".")[0] in MISSING else super().find_spec(name, *arguments)

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, CoreFinder]
"""
"""The beginning of a program for which only the packages of the core are installed."""


def run_on_the_core(code, *arguments):
    names = core()
    missing = [
        module
        for module, owners in packages_distributions().items()
        if not names & {canonicalize_name(owner) for owner in owners}
    ]
    return subprocess.run(
        [sys.executable, "-c", ON_THE_CORE.format(missing=missing) + code, *arguments],
        capture_output=True,
        text=True,
    )


def test_the_core_brings_no_optional_dependency():
    owners = packages_distributions()
    optional = {canonicalize_name(owner) for module in OPTIONAL for owner in owners.get(module, [])}
    assert len(optional) >= len(OPTIONAL)
    assert not core() & optional


@pytest.mark.slow
def test_the_example_of_the_readme_runs_on_the_core():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if "transformers" not in block]
    done = run_on_the_core(example + "print(*monitor.statistics().values())")
    assert done.returncode == 0, done.stderr
    assert "'verdict': 'routes'" in done.stdout


@pytest.mark.slow
def test_the_command_line_says_which_extra_it_needs():
    done = run_on_the_core("from comet_moe.cli import main; main()", "--help")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().splitlines() == [
        "comet-moe: the command line needs typer, which is not installed: pip install 'comet-moe[cli]'"
    ]
