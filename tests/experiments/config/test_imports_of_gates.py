"""``comet-moe --import``: what is imported, what goes wrong, and that configurations import nothing."""

import subprocess
import sys

import pytest

from comet_moe.exceptions import RecipeError
from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.config.imports import VARIABLE, import_options, import_requested, request_imports
from comet_moe.gates.registry import gate_names

GATE = """
from comet_moe.gates import UniformGate, register_gate

@register_gate("own")
class OwnGate(UniformGate):
    pass
"""


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in {"own_file", "broken_file"} & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.mark.slow
def test_a_file_is_imported_once_and_in_processes_that_are_started(tmp_path):
    (tmp_path / "own_file.py").write_text(GATE + "print('imported')")
    request_imports(["own_file.py"])
    import_requested()
    assert "own+" in gate_names()
    assert load_train_config("multidigits", ["gate=own"]).gate.name == "own"
    assert import_options() == ["--import", str(tmp_path / "own_file.py")]
    code = "from comet_moe.experiments.config.imports import import_requested as go; go(); go()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "imported\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.py", "--import .*missing.py: there is no such file, give a Python file or a module"),
        ("no_such_module", "--import no_such_module failed .*No module named 'no_such_module'"),
        ("broken_file.py", "--import .*broken_file.py failed .ZeroDivisionError"),
        ("json.py", "there is another module json already, rename the file"),
    ],
)
def test_what_cannot_be_imported_is_one_sentence(tmp_path, source, message):
    (tmp_path / "broken_file.py").write_text("1 / 0")
    (tmp_path / "json.py").write_text("")
    with pytest.raises(RecipeError, match=message):
        request_imports([source])
    assert "broken_file" not in sys.modules


def test_a_gate_in_a_recipe_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "own_file.py").write_text(GATE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own", "own_file:own", "own_file.py"):
        with pytest.raises(RecipeError, match=r"to use a gate of your own, import the file .* --import FILE"):
            load_train_config("multidigits", [f"gate={name}"])
    assert "own_file" not in sys.modules
