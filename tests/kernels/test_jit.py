"""Compilation: private options only where they work, a cache that follows the sources, imports everywhere."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import comet_moe
from comet_moe.kernels import jit
from comet_moe.kernels.autograd import as_array


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
    run("import numba, os, torch; del os.register_at_fork\nimport comet_moe.gates, comet_moe.kernels.threads")


@pytest.mark.parametrize(
    ("version", "is_below"),
    [
        ("0.61.0", True),
        ("0.68.1", True),
        ("0.69.0", False),
        ("0.69.0rc1", False),
        ("1.0", False),
        ("0+unknown", False),
    ],
)
def test_versions_are_compared_by_number(version, is_below):
    assert jit._is_below(version, (0, 69)) == is_below


@pytest.mark.parametrize("package", ["numba", "llvmlite"])
def test_private_options_are_not_used_with_untested_versions(package, monkeypatch):
    assert jit._accepts_option("_nrt")
    assert jit._accepts_wide_vectors()
    monkeypatch.setattr(f"{package}.__version__", "99.0.0")
    assert not jit._accepts_option("_nrt")
    assert not jit._accepts_wide_vectors.__wrapped__()


def test_private_options_that_are_refused_are_not_used(monkeypatch):
    assert not jit._accepts_option("_not_an_option_of_numba")

    def refuse(function):
        raise ValueError("not a known attribute")

    monkeypatch.setattr(jit, "_prefer_wide_vectors", refuse)
    assert not jit._accepts_wide_vectors.__wrapped__()


def double(x):
    return 2 * x


def test_functions_compile_without_private_options(monkeypatch):
    monkeypatch.setattr(jit, "_accepts_option", lambda name: False)
    assert "_nrt" not in jit.jit(double, allocates=False).targetoptions
    monkeypatch.undo()
    assert jit.jit(double, allocates=False).targetoptions["_nrt"] is False


CALLER = """
from comet_moe.kernels.jit import jit
from comet_moe.kernels.made_up_helper import inlined, called

@jit
def function(x):
    return inlined(x) + called(x)
"""
HELPER = """
from comet_moe.kernels.jit import jit, jit_inline

@jit_inline
def inlined(x):
    return x + {a}

@jit
def called(x):
    return x * {b}
"""
CALL = """
from comet_moe.kernels.made_up_caller import function
print(function(10), sum(function.stats.cache_hits.values()))
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
def test_arrays_have_the_values_of_tensors_and_are_contiguous(tensor):
    array = as_array(tensor)
    assert array.flags.c_contiguous
    assert array.tolist() == tensor.tolist()


def test_arrays_of_contiguous_tensors_share_their_memory():
    tensor = torch.zeros(2, 3)
    as_array(tensor)[1, 2] = 5
    assert tensor[1, 2] == 5
