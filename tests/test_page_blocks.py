"""Every code block and every command of README and docs is run by a test, or listed with a reason."""

import ast
import re
import shlex

import pytest
import typer

from comet_moe.cli.app import app
from pages import (
    NOT_RUN,
    PYTHON_NOT_RUN,
    RESULT_SCRIPT,
    ROOT,
    RUN_BY,
    all_pages,
    blocks,
    commands,
    commands_to_run,
)

PAGES = all_pages()
PROSE = ("", "sh", "python", "yaml", "text")
"""Languages of blocks; "text" is what a command prints, and those in braces are directives of the site."""


def parsed(words):
    """``words`` of a comet-moe command through the parser of its verb, which checks options and values."""
    group = typer.main.get_command(app)
    context = group.make_context("comet-moe", words)
    while hasattr(context.command, "commands"):
        name, context.command, rest = context.command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context = context.command.make_context(name, list(rest), parent=context)
    return context


@pytest.mark.parametrize("page", PAGES)
def test_a_page_with_something_to_run_is_run_by_a_test_that_names_it(page):
    code = blocks(page, "python") if page not in PYTHON_NOT_RUN else []
    if not (code or commands_to_run(page) or page in RUN_BY):
        return
    assert page in RUN_BY, "name its test in tests/pages.py, or list its commands there with a reason"
    assert code or commands_to_run(page) or blocks(page, "yaml"), "it has nothing to run"
    text = (ROOT / RUN_BY[page]).read_text(encoding="utf-8")
    assert page in text or page.removeprefix("docs/") in text or page.removeprefix("docs/tutorials/") in text


@pytest.mark.parametrize("page", PAGES)
def test_a_block_has_a_language_that_is_run(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    opened = re.findall(r"^```([^\n]*)\n.*?^```", text, re.DOTALL | re.MULTILINE)
    assert {language for language in opened if not language.startswith("{")} <= set(PROSE)


def test_what_is_listed_as_not_run_is_still_in_a_page():
    written = {command for page in PAGES for command in commands(page)}
    assert set(NOT_RUN) <= written
    assert all(blocks(page, "python") for page in PYTHON_NOT_RUN)
    assert set(RUN_BY) <= set(PAGES)


@pytest.mark.parametrize("command", [command for command in NOT_RUN if "comet" in command.split("/")[0]])
def test_a_command_that_is_not_run_has_options_and_values_that_its_verb_takes(command):
    if NOT_RUN[command] in ("installs", "a synopsis"):  # test_docs.py checks the options of a synopsis
        return
    words = shlex.split(command)
    start = words.index("comet_moe" if "comet_moe" in words else "comet-moe") + 1
    assert parsed(words[start:]).command.name == words[start : start + 2][words[start] == "data"]


def test_a_wrong_option_of_a_command_is_noticed():
    with pytest.raises(Exception, match="--trails"):
        parsed(["tune", "multidigits", "--trails", "3"])


def test_a_script_of_results_exists_and_is_code():
    found = [RESULT_SCRIPT.match(command) for page in PAGES for command in commands(page)]
    scripts = {ROOT / script[1] for script in found if script}
    assert scripts
    for path in scripts:
        assert path.is_file(), path
        if path.suffix == ".py":
            ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", sorted(PYTHON_NOT_RUN))
def test_code_that_is_not_run_imports_names_that_exist(page):
    for block in blocks(page, "python"):
        imports = [node for node in ast.parse(block).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert imports
        exec(compile(ast.Module(imports, []), page, "exec"), {})
