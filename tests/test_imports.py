"""The order of the packages: each imports only from those above it, and there are no cycles."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import comet_moe

ROOT = Path(comet_moe.__file__).parent

ORDER = (
    "exceptions",
    "files",
    "memory",
    "verdict",
    "notebook",
    "checks",
    "devices",
    "stepping",
    "statistics",
    "routing",
    "kernels",
    "gates",
    "local_search",
    "lazy_adam",
    "optimization",
    "experts",
    "mixture",
    "interventions",
    "routes",
    "parallel",
    "monitor",
    "lightning",
    "testing",
    "hf",
    "growing",
    "audit",
    "bert",
    "experiments",
    "sklearn",
    "cli",
    "__main__",
)
"""Top to bottom, as in CONTRIBUTING.md. ``comet_moe/__init__.py`` loads names when first used."""

EXPERIMENTS = ("config", "data", "models", "export", "training", "bert", "studies", "report", "demo")
"""The same for the packages of ``comet_moe.experiments``."""

WITHOUT_TORCH = (
    "exceptions",
    "files",
    "memory",
    "verdict",
    "gates.registry",
    "experiments.config",
    "experiments.report",
    "experiments.training.records",
    *(
        f"experiments.studies.{name}"
        for name in (
            "loss_by_trials",
            "pool",
            "process",
            "reading",
            "records",
            "render",
            "significance",
            "tables",
            "text_tables",
            "winner",
        )
    ),
)
"""What may not import torch, directly or through others of the library, when it is imported."""


def modules():
    """Every module of the library: its name without "comet_moe." and its syntax tree."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            yield name, ast.parse(path.read_text(encoding="utf-8"))


NAMES = {name for name, _ in modules()}


def imported(tree, everywhere):
    """Modules that ``tree`` imports, in functions too or only when it is itself imported."""
    nodes = ast.walk(tree) if everywhere else _at_import(tree.body)
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name is from"
            for alias in node.names:
                as_module = f"{node.module}.{alias.name}"
                yield as_module if as_module.removeprefix("comet_moe.") in NAMES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _at_import(body):
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        for inner in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                yield from _at_import(getattr(node, inner, []))


def ours(names):
    return {name.removeprefix("comet_moe.") for name in names if name.startswith("comet_moe.")}


def test_the_order_names_every_package_and_module_of_the_top_level():
    assert {name.partition(".")[0] for name in NAMES} == set(ORDER)


def test_each_package_imports_only_from_those_above_it():
    for name, tree in modules():
        for other in ours(imported(tree, everywhere=True)):
            assert rank(other) <= rank(name), f"{name} imports {other}, which is below it"


def rank(module):
    """The place of a module in ORDER, and within the experiments in EXPERIMENTS."""
    top, _, rest = module.partition(".")
    part = rest.partition(".")[0]
    return ORDER.index(top), EXPERIMENTS.index(part) if top == "experiments" and part else -1


def test_there_are_no_cycles_between_modules():
    graph = {}
    for name, tree in modules():
        direct = ours(imported(tree, everywhere=True)) & NAMES
        packages = {other.rpartition(".")[0] for other in direct} - {""}
        # Importing a module runs its package's __init__ first, unless that is where we are already.
        graph[name] = direct | {package for package in packages if not name.startswith(package)}
        graph[name].discard(name)
    TopologicalSorter(graph).prepare()  # raises CycleError, which lists the cycle


def test_what_needs_no_torch_does_not_import_it():
    at_import = {name: set(imported(tree, everywhere=False)) for name, tree in modules()}
    for start in (name for name in NAMES if name.startswith(WITHOUT_TORCH)):
        seen, waiting = set(), [start]
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            package = name.rpartition(".")[0]
            waiting += [*ours(at_import.get(name, ())), *([package] if package else [])]
            assert "torch" not in {other.partition(".")[0] for other in at_import.get(name, ())}, (
                f"importing {start} imports torch, through {name}"
            )
