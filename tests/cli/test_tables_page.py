"""The commands of docs/tables.md run one after the other, on a made-up table."""

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
from command import succeed

from made_tables import customers, write_table

PAGE = Path(__file__).parents[2] / "docs" / "tables.md"


def commands():
    text = PAGE.read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if not language:
            yield from (shlex.split(line)[1:] for line in block.splitlines())


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_table(customers(600), Path("my.csv"))
    write_table(customers(40, seed=1).drop(columns=["bought", "spend"]), Path("new.csv"))
    for command in commands():
        succeed(*command)
    predictions = pd.read_csv("predictions.csv")
    assert list(predictions) == ["bought", "spend"]
    assert len(predictions) == 40
