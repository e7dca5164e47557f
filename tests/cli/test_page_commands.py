"""The commands of docs/training.md, data.md, tuning.md, report.md and of results run, on tiny data."""

import glob
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml
from command import succeed
from raw_sets import write_raw

from comet_moe.experiments.config.search_space import load_search_space
from comet_moe.experiments.report import write_report
from pages import ROOT, blocks, commands_to_run

pytestmark = pytest.mark.slow

SMALL = ("--set", "training.epochs=1", "--set", "training.threads=1")
DIGITS = ("--set", "data.options.train_size=96", "--workers", "1")
FEWER = {
    "train": SMALL,
    "tune": (*SMALL, *DIGITS, "--gates", "topk,comet+", "--trials", "1"),
    "ablate": (*SMALL, "--set", "data.any_size=true", "--seeds", "1", "--gates", "dense", "--workers", "1"),
    "curves": ("--repeats", "20"),
    "data prepare": ("--any-size",),
}
"""Options that are given again: the last one counts."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """Raw files of the data sets that the pages name, a study and two runs, all tiny."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("movielens", "movielens-100k", "movielens-200k"):
        write_raw(name, folder / "raw" / name)
    ratings = pd.read_csv(write_raw("ratings", folder / "raw" / "ratings"))
    ratings.assign(who=ratings["user"], what=ratings["item"]).to_csv(folder / "my.csv", index=False)
    ratings[["user", "item"]].head(20).to_csv(folder / "new.csv", index=False)
    return folder


def run(words, folder):
    """Run a command of a page with names of tiny files in place of its own, and smaller sizes."""
    program, *words = words
    assert program == "comet-moe"
    recipe = next((word for word in words if word.startswith("movielens")), None)
    words = [word.replace("DIR", str(folder / "raw" / str(recipe))) for word in words]
    words = [path for word in words for path in (sorted(glob.glob(word)) if "*" in word else [word])]
    # The authors' split needs files of theirs that tests/data makes up; the split is the only change.
    words = ["data.split=random" if word == "data.split=authors" else word for word in words]
    verb = " ".join(words[:2]) if words[0] == "data" else words[0]
    return succeed(*words, *FEWER.get(verb, ()))


@pytest.mark.parametrize("page", ["docs/training.md", "docs/data.md", "docs/tuning.md"])
def test_the_commands_of_a_page_run_one_after_the_other(page, workshop, monkeypatch, tmp_path):
    for name in ("my.csv", "new.csv"):
        shutil.copy(workshop / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    for number, words in enumerate(commands_to_run(page)):
        if words[:3] == ["comet-moe", "train", "ratings"]:
            words += ["--out", f"runs/ratings-{number}"]  # two of them, which a reader would not start both
        run(words, workshop)


def test_the_search_space_of_tuning_is_one(tmp_path):
    (text,) = blocks("docs/tuning.md", "yaml")
    file = ROOT / "src/comet_moe/experiments/recipes/movielens-100k.yaml"
    recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(recipe | yaml.safe_load(text)), encoding="utf-8")
    space = load_search_space(str(path), "comet+")
    assert {"training.learning_rate", "search.epochs", "model.dropout"} <= set(space)
    assert "gate.gamma" not in space


def test_the_commands_and_the_code_of_the_report_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digits = (*SMALL, "--set", "data.options.train_size=96")
    succeed("train", "multidigits", "--set", "gate=comet", *digits)
    shutil.copytree(ROOT / "docs/results/multidigits", "studies/mine")
    for words in commands_to_run("docs/report.md"):
        run(words, tmp_path)
    pages = {name: Path(name).stat().st_size for name in ("report.html", "all.html")}
    assert pages["all.html"] > pages["report.html"] > 10_000
    Path("report.html").unlink()
    (code,) = blocks("docs/report.md", "python")
    exec(compile(code, "docs/report.md", "exec"), {"write_report": write_report})
    assert Path("report.html").is_file()


@pytest.mark.parametrize(
    "page",
    [
        "docs/results/ablation/README.md",
        "docs/results/bert/README.md",
        "docs/results/books/README.md",
        "docs/results/jester/README.md",
        "docs/results/multidigits/README.md",
        "docs/results/multifashionmnist/README.md",
        "docs/results/multimnist/README.md",
        "docs/results/small-experts/README.md",
        "docs/results/tuning/README.md",
    ],
)
def test_the_tables_of_results_are_those_of_their_commands(page, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    for words in commands_to_run(page):
        assert words[1] in ("table", "curves")
        page_rows = (ROOT / page).read_text(encoding="utf-8")
        rows = [line for line in run(words, tmp_path).out.splitlines() if line.startswith("| ")]
        assert rows
        measured = [row for row in rows if "±" in row] if words[1] == "table" else []
        if "books/" in page:  # a table of its own, beside the paper's numbers
            losses = [row.replace("*", "").split(" | ")[4] for row in measured]
            assert len(losses) == 11
            assert [loss for loss in losses if f"| {loss} |" not in page_rows.replace("*", "")] == []
        elif "ablation" not in page:  # a table of its own, with other digits
            assert [row for row in measured if row not in page_rows] == []
