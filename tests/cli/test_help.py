"""`comet-moe --help` is fast because it imports nothing heavy, and every verb has help."""

import json
import subprocess
import sys

import pytest
from command import comet_moe, refusal, succeed

import comet_moe as package

HEAVY = [
    *("torch", "numpy", "scipy", "numba", "safetensors"),
    *("pandas", "pyarrow", "sklearn", "PIL", "pooch", "pydantic", "yaml", "rich"),
    *("optuna", "sqlalchemy", "plotly", "jinja2", "transformers", "onnx"),
]


def run_with(code):
    """Run Python ``code`` in a fresh process, in which modules are not imported yet."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def verbs():
    """Every command and subcommand, as lists of arguments."""
    import typer

    from comet_moe.cli.app import app

    for name, command in typer.main.get_command(app).commands.items():
        yield [name]
        yield from ([name, below] for below in getattr(command, "commands", ()))


def test_help_imports_nothing_heavy():
    code = f"""
import json, sys
from comet_moe.cli import main
sys.argv = ["comet-moe", "--help"]
try:
    main()
except SystemExit as stop:
    assert not stop.code
print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
"""
    done = run_with(code)
    assert done.returncode == 0, done.stderr
    *help_text, imported = done.stdout.splitlines()
    assert "Commands:" in help_text
    assert json.loads(imported) == []


def test_every_verb_has_help_without_torch():
    code = f"""
import sys
sys.modules["torch"] = None  # an import of torch fails
from comet_moe.cli import main
for verb in {list(verbs())}:
    sys.argv = ["comet-moe", *verb, "--help"]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, verb
"""
    done = run_with(code)
    assert done.returncode == 0, done.stderr
    for verb in verbs():
        assert f"Usage: comet-moe {' '.join(verb)} " in done.stdout


def test_every_fixed_verb_exists():
    fixed = (
        "demo audit prune data train evaluate predict export tune ablate table curves flops report bert bench"
    )
    assert set(fixed.split()) <= {verb[0] for verb in verbs()}


def test_no_arguments_show_the_help_and_version_the_version():
    assert succeed().out == succeed("--help").out
    assert succeed("--version").out == f"{package.__version__}\n"


@pytest.mark.parametrize("module", ["typer", "pydantic", "pandas"])
def test_without_the_extra_the_command_says_how_to_install_it(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    assert refusal("--help") == (
        f"comet-moe: the command line needs {module}, which is not installed: pip install 'comet-moe[cli]'"
    )


def test_the_command_line_module_can_be_imported_without_typer():
    done = run_with("import sys; sys.modules['typer'] = None; import comet_moe.cli")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message", "command"),
    [
        (["train"], "missing argument 'RECIPE'", "comet-moe train"),
        (["train", "a", "b"], "got unexpected extra argument", "comet-moe train"),
        (["trian"], "no such command 'trian'", "comet-moe"),
        (["data"], "missing command", "comet-moe data"),
        (["bench", "--quik"], "no such option", "comet-moe bench"),
        (["demo", "--epochs", "x"], "invalid value for '--epochs': ", "comet-moe demo"),
        (["train", "multidigits", "--set"], "option '--set' requires an argument", "comet-moe"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments, message, command):
    sentence = refusal(*arguments)
    assert sentence.startswith(f"comet-moe: {message}")
    assert sentence.endswith(f" (see `{command} --help`)")


def test_ctrl_c_is_exit_code_130(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("comet_moe.experiments.data.default_cache", interrupt)
    done = comet_moe("data", "list")
    assert (done.code, done.out) == (130, "")
    assert "Traceback" not in done.err
