"""What README and docs name exists: commands with their options and settings, files, links."""

import re
import shlex
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from comet_moe.cli.app import app
from comet_moe.experiments.config import BertConfig, TrainConfig, list_recipes
from comet_moe.experiments.config.loader import _setting_names

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md")))]
PAGES += [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/results/*/README.md"))]
CODE = re.compile(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", re.DOTALL)
SUFFIXES = ("py", "md", "sh", "toml")
OUTPUTS = ("html", "json", "jsonl", "safetensors", "yaml")


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def code_lines(page):
    """The lines of code blocks and what stands between backticks, without comments."""
    for block, inline in CODE.findall(read(page)):
        for line in (block or inline).replace("\\\n", " ").splitlines():
            yield re.sub(r"(^|\s)#.*", "", line).strip()


def commands():
    for page in PAGES:
        for line in code_lines(page):
            for part in line.split(";"):
                found = re.search(r"(?:^|\s)(?:comet-moe|-m comet_moe) (.+)", part)
                if found:
                    yield pytest.param(found[1], id=f"{page}: {found[1]}")


@cache
def verbs():
    return typer.main.get_command(app).commands


@cache
def setting_names():
    return {name for config in (TrainConfig, BertConfig) for name in _setting_names(config)}


@pytest.mark.parametrize("text", list(commands()))
def test_a_command_exists_with_its_options_and_settings(text):
    words = shlex.split(text.replace("...", "").replace("[", "").replace("]", ""))
    if words[0] == "--import":  # stands before the verb
        words = words[2:]
    verb = verbs()[words[0]]
    if words[0] in ("data", "bert") and len(words) > 1:
        verb = verb.commands[words[1]]
    known = {name for parameter in verb.params for name in parameter.opts} | {"--help"}
    assert {word for word in words if word.startswith("-")} <= known
    for option, setting in pairwise(words):
        if option == "--set" and words[0] != "data" and "=" in setting and setting != "a.b=c":
            name = setting.partition("=")[0]
            assert name in setting_names() or name.startswith(("data.options.", "gates."))


@pytest.mark.parametrize("page", PAGES)
def test_a_file_that_a_page_names_exists(page):
    package = ROOT / "src/comet_moe"
    folders = (ROOT, package, package / "experiments", ROOT / "docs", (ROOT / page).parent)
    for line in code_lines(page):
        for name in re.findall(rf"(?<![\w./-])(?:[\w-]+/)*[\w-]+\.(?:{'|'.join(SUFFIXES)})(?![\w./])", line):
            is_input = name.startswith(("runs/", "studies/", "my.", "new."))
            assert is_input or any((folder / name).exists() for folder in folders), name


@pytest.mark.parametrize("page", PAGES)
def test_a_link_leads_to_a_page_and_to_one_of_its_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = (ROOT / page).parent / path if path else ROOT / page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_is_named_in_its_page(name):
    page = "docs/bert.md" if name.startswith("bert-") else "docs/training.md"
    assert f"`{name.removeprefix('bert-')}`" in read(page)


def test_a_setting_in_backticks_exists():
    sections = {name.partition(".")[0] for name in setting_names() if "." in name}
    for page in PAGES:
        for line in code_lines(page):
            for name in re.findall(r"^([a-z_]+\.[a-z_]+)$", line):
                if name.partition(".")[0] in sections and name.split(".")[1] not in SUFFIXES + OUTPUTS:
                    assert name in setting_names(), f"{page}: {name}"
