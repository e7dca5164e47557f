"""The code and the commands of the tutorials run, with fewer trials, seeds and epochs."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from command import succeed

from made_tables import customers, write_table

DOCS = Path(__file__).parents[2] / "docs"
SMALL = ("--set", "training.epochs=1", "--workers", "1")
FEWER = {
    "tune": (*SMALL, "--set", "data.options.train_size=96", "--gates", "dense,comet", "--trials", "1"),
    "ablate": (*SMALL, "--set", "data.options.train_size=96", "--gates", "dense", "--seeds", "1"),
    "curves": ("--repeats", "20"),
    "compare": ("--set", "training.epochs=1", "--seeds", "1", "--gates", "dense,comet", "--workers", "1"),
}
"""Options that are given again: the last one counts."""


def blocks(page, language):
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"^```([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


def commands(page):
    return [line for block in blocks(page, "") for line in block.splitlines()]


def run_command(line):
    program, verb, *arguments = shlex.split(line)
    assert program == "comet-moe"
    return succeed(verb, *arguments, *FEWER.get(verb, ()))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", ["tutorials/own-model.md", "routing.md", "make-it-route.md"])
def test_the_code_of_a_page_runs(page):
    exec(compile("\n".join(blocks(page, "python")), page, "exec"), {})


def test_the_code_of_many_machines_runs_in_a_group_of_one(monkeypatch):
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
    ):
        monkeypatch.setenv(name, value)
    exec(compile("\n".join(blocks("tutorials/many-machines.md", "python")), "many-machines.md", "exec"), {})
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_the_commands_of_own_table_run():
    write_table(customers(300), Path("my.csv"))
    write_table(customers(20, seed=1).drop(columns=["bought", "spend"]), Path("new.csv"))
    inspect, compare, predict = commands("tutorials/own-table.md")
    assert "bought" in run_command(inspect).out
    assert "Use " in run_command(compare).out
    run_command(predict)
    assert len(Path("predictions.csv").read_text().splitlines()) == 21


@pytest.mark.slow
def test_the_commands_of_comparing_gates_run():
    for line in commands("tutorials/comparing-gates.md"):
        run_command(line)
    assert Path("report.html").stat().st_size > 10_000
