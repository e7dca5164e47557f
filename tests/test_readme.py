"""The README's example runs as it stands, and does what the text around it says."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs_and_the_gate_becomes_sparse(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert 1 <= float(capsys.readouterr().out) <= 2.5  # k is 2, and a few trees may still be soft


def test_every_gate_of_the_library_is_in_the_table():
    from comet_moe import gates

    table = README.read_text(encoding="utf-8")
    for name in gates.__all__:
        if name.endswith("Gate") and name != "Gate":
            assert f"`{name}(" in table


def test_the_package_and_the_module_have_one_version():
    from importlib.metadata import version

    import comet_moe

    assert comet_moe.__version__ == version("comet-moe")
