"""Compilation: nothing before it pays, nothing that breaks the package, a cache that follows the sources."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import comet_moe
from comet_moe.kernels import jit, members, status
from comet_moe.kernels.members import in_order
from comet_moe.kernels.threads import over_rows


def run(code, root=None, **kwargs):
    """Standard output of ``code`` in a new process, with the package from ``root`` if given."""
    prefix = "" if root is None else f"import sys; sys.path.insert(0, {str(root)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", prefix + code], capture_output=True, text=True, check=False, **kwargs
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_package_imports_where_processes_cannot_fork():
    run("import os, torch; del os.register_at_fork\nimport comet_moe.gates, comet_moe.kernels.threads")


SMALL_MODEL = """
import sys, torch
from comet_moe import MoE
from comet_moe.experts import DenseExperts
from comet_moe.gates import CometGate
moe = MoE(experts=DenseExperts(8, 32, 32), gate=CometGate(32, 8, k=2))
y, routing = moe(torch.randn(64, 32))
(y.sum() + routing.aux_loss).backward()
with torch.no_grad():
    moe.eval()(torch.randn(64, 32))
assert "numba" not in sys.modules
"""


@pytest.mark.slow
def test_a_small_model_trains_and_evaluates_without_the_compiler():
    run(SMALL_MODEL)


def test_what_is_worth_compiling_depends_on_the_work_alone(monkeypatch):
    monkeypatch.setattr(jit, "SMALL_WORK", 2**20)
    assert not jit.is_worth_compiling(2**20 - 1)
    assert jit.is_worth_compiling(2**20)


LARGE_MODEL = """
import torch, warnings
from comet_moe import MoE, kernels
from comet_moe.experts import DenseExperts
from comet_moe.gates import CometGate
gate = CometGate(64, 16, k=2, gamma=1e-3)
torch.nn.init.normal_(gate.split_weight)
moe = MoE(experts=DenseExperts(16, 64, 64, dropout=0.5), gate=gate, execution="sparse")
x = torch.randn(512, 64, requires_grad=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        y, routing = moe(x)
        (y.sum() + routing.aux_loss).backward()
        assert x.grad.isfinite().all()
    with torch.no_grad():
        moe.eval()
        assert moe(x)[1].weights.sum(1).allclose(torch.ones(512))
print(kernels.status())
print(sorted(str(warning.message).split(";")[0] for warning in caught))
"""
"""Work enough for every compiled path: soft trees, products, mixing and the descent."""

MOVED = {
    "numba": """
import sys
sys.modules["numba.extending"] = None
""",
    "llvmlite": """
import llvmlite.binding
original = llvmlite.binding.add_symbol
def moved(name, address):
    if name.startswith("comet_moe_") and "gemm" in name:
        raise AttributeError("add_symbol has moved")
    return original(name, address)
llvmlite.binding.add_symbol = moved
""",
    "openmp": """
import ctypes
original = ctypes.CDLL.__getattr__
def moved(self, name):
    if name == "GOMP_parallel":
        raise AttributeError("GOMP_parallel has moved")
    return original(self, name)
ctypes.CDLL.__getattr__ = moved
""",
}
"""Programs after which a name that a compiled path needs is not where it was."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moved", "path", "words"),
    [
        ("numba", "numba", "fails with ModuleNotFoundError"),
        ("llvmlite", "mkl", "add_symbol has moved"),
        ("openmp", "openmp", "GOMP_parallel has moved"),
    ],
)
def test_a_name_that_has_moved_switches_its_path_off_and_nothing_else(moved, path, words):
    if getattr(status(), path):
        pytest.skip(f"{path} does not run here: {getattr(status(), path)}")
    several = os.environ | {"OMP_NUM_THREADS": "2"}  # one thread needs no team
    *lines, caught = run(MOVED[moved] + LARGE_MODEL, env=several).splitlines()
    reasons = dict(line.split(": ", 1) for line in lines)
    assert words in reasons[path]
    assert caught.count(words) == 1  # warned once
    others = {"numba", "openmp", "mkl"} - {path}
    assert all(reasons[name] == "runs" for name in others) or path == "numba"


def test_the_status_says_what_runs_here():
    found = status()
    assert str(found).splitlines()[0] == f"numba: {found.numba or 'runs'}"
    assert bool(found.numba) == (not jit.NUMBA_ENABLED)
    assert not found.numba or (found.mkl and found.openmp and found.cache_folder is None)


@pytest.mark.slow
def test_without_the_compiler_all_paths_name_the_reason():
    code = "from comet_moe import kernels; print(kernels.status())"
    lines = run(f"import os; os.environ['NUMBA_DISABLE_JIT'] = '1'\n{code}").splitlines()
    assert lines[:3] == [f"{name}: NUMBA_DISABLE_JIT is set" for name in ("numba", "openmp", "mkl")]


def test_a_loop_that_cannot_be_compiled_says_why(monkeypatch):
    monkeypatch.setattr(members, "why_not_numba", lambda: "numba is not installed")
    with pytest.raises(RuntimeError, match="called where none can run: numba is not installed"):
        over_rows(jit.jit(lambda part, first, last, x: None), 1, 1, 1)


CALLER = """
from comet_moe.kernels.jit import jit
from comet_moe.kernels.made_up_helper import added, called

@jit
def function(part, first, last, x, y):
    for row in range(first, last):
        y[row] = added(x[row]) + called(x[row])
"""
HELPER = """
from comet_moe.kernels.jit import jit

@jit
def added(x):
    return x + {a}

@jit
def called(x):
    return x * {b}
"""
CALL = """
import torch
from comet_moe.kernels.made_up_caller import function
from comet_moe.kernels.members import find_member
from comet_moe.kernels.threads import over_rows
x, y = torch.tensor([10]), torch.zeros(1, dtype=torch.int64)
over_rows(function, 1, 1, x, y)
member = find_member(function, ((torch.int64, 1), (torch.int64, 1)))
print(y.item(), member.compiled.cache_hits)
"""


@pytest.mark.slow
def test_the_cache_follows_changes_of_helpers_in_other_files(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    source, package = Path(comet_moe.__file__).parent, tmp_path / "comet_moe"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("__init__.py", "checks.py"):
        package.mkdir(exist_ok=True)
        shutil.copy(source / name, package)
    shutil.copytree(source / "kernels", package / "kernels", ignore=ignored)
    (package / "kernels" / "made_up_caller.py").write_text(CALLER)
    helper = package / "kernels" / "made_up_helper.py"
    helper.write_text(HELPER.format(a=1, b=2))
    assert run(CALL, tmp_path).split() == ["31", "0"]
    assert run(CALL, tmp_path).split() == ["31", "1"]  # from the cache
    helper.write_text(HELPER.format(a=5, b=3))
    assert run(CALL, tmp_path).split() == ["45", "0"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3),
        torch.randn(3, 4).T,
        torch.randn(4, 6)[:, ::2],
        torch.randn(4, 3, dtype=torch.complex64).conj().imag,
        torch.nn.Parameter(torch.randn(4, 3)),
        torch.randn(1, 3).expand(4, 3),
        torch.empty(4, 0, 3),
    ],
    ids=["plain", "transposed", "strided", "negated", "parameter", "expanded", "empty"],
)
def test_tensors_for_loops_have_their_values_in_order(tensor):
    ordered = in_order(tensor)
    assert ordered.is_contiguous()
    assert not ordered.is_neg()
    assert ordered.tolist() == tensor.tolist()


def test_tensors_in_order_are_not_copied():
    tensor = torch.zeros(2, 3)
    assert in_order(tensor) is tensor
