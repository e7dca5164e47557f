"""The blocks of docs/audit.md run from top to bottom, then its commands."""

import re
import shlex
from pathlib import Path

import pytest
from command import comet_moe
from transformers import AutoModelForCausalLM

from comet_moe.audit import CODES

PAGE = Path(__file__).parents[2] / "docs" / "audit.md"


def blocks(language):
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for own, block in found if own == language]


def test_the_page_lists_all_codes():
    listed = re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == list(CODES)


@pytest.mark.slow
def test_the_blocks_and_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks("python")), PAGE.name, "exec"), {})
    printed = capsys.readouterr().out
    assert "no findings" in printed
    assert "router-idle" in printed
    for command in "".join(blocks("")).splitlines():
        done = comet_moe(*shlex.split(command)[1:])
        assert done.code == 0, done.err
    assert Path("audit.html").stat().st_size > 10_000
    assert AutoModelForCausalLM.from_pretrained("smaller").config.num_local_experts == 3
