"""The three ways into the library that README shows run as they are; its table lists every gate."""

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
from command import comet_moe, succeed

from made_tables import customers, write_table
from pages import commands_to_run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICK = ("--set", "training.epochs=1", "--seeds", "1", "--gates", "dense,comet", "--workers", "1")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMET_MOE_CACHE", str(tmp_path / "cache"))


def test_each_way_in_has_at_most_ten_lines_of_code():
    ways = [*blocks("python"), blocks("")[1]]
    assert len(ways) == 3
    assert all(sum(map(bool, way.splitlines())) <= 10 for way in ways)  # without blank lines


@pytest.mark.slow
def test_gates_are_compared_on_a_table():
    write_table(customers(300), Path("my.csv"))
    write_table(customers(20, seed=1).drop(columns=["bought", "spend"]), Path("new.csv"))
    compare, predict = (shlex.split(line)[1:] for line in blocks("")[1].splitlines())
    assert "Use " in succeed(*compare, *QUICK).out  # fewer epochs, seeds and gates
    assert re.search(r"using .*(dense-000|comet-000|linear\.skops|lightgbm\.skops)", succeed(*predict).err)
    assert len(pd.read_csv("predictions.csv")) == 20


def test_the_command_on_the_site_s_first_page_is_one_of_readme():
    assert [shlex.split(line) for line in blocks("")[1].splitlines()[:1]] == commands_to_run("docs/index.md")


def test_a_study_without_weights_is_refused_in_one_sentence():
    study = ROOT / "docs" / "results" / "multidigits"
    done = comet_moe("predict", study, "new.csv", "-o", "predictions.csv")
    assert done.code == 2
    assert "multidigits has no finished run with weights on this machine" in done.err


def test_the_model_with_a_monitor_runs_and_its_gate_is_described():
    names = {}
    exec(compile(blocks("python")[0], "README.md", "exec"), names)
    (numbers,) = names["monitor"].statistics().values()
    assert numbers["verdict"] in ("routes", "dense")


def test_the_transformers_model_trains_with_our_gates():
    pytest.importorskip("transformers")
    names = {}
    exec(compile(blocks("python")[1], "README.md", "exec"), names)
    assert "CometGate" in repr(names["model"])
    assert names["trainer"].state.global_step == 5


def test_every_gate_is_in_the_table():
    from comet_moe import gates

    for name in gates.__all__:
        if name.endswith("Gate") and name not in ("Gate", "GateWrapper", "UniformGate"):
            assert f"`{name}(" in README


def test_the_package_and_the_module_have_the_same_version():
    from importlib.metadata import version

    import comet_moe as package

    assert package.__version__ == version("comet-moe")
