"""The example in the README runs, and the README lists every gate."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs_and_the_gate_becomes_sparse(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert 1 <= float(capsys.readouterr().out) <= 2.5  # k is 2, and some trees may be soft


def test_every_gate_is_in_the_table():
    from comet_moe import gates

    table = README.read_text(encoding="utf-8")
    for name in gates.__all__:
        if name.endswith("Gate") and name not in ("Gate", "GateWrapper", "UniformGate"):
            assert f"`{name}(" in table


def test_the_package_and_the_module_have_the_same_version():
    from importlib.metadata import version

    import comet_moe

    assert comet_moe.__version__ == version("comet-moe")
