"""``comet-moe demo`` of docs/index.md, its two made-up tables and the regions of the experts."""

import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from command import refusal, succeed

from comet_moe.cli.demo import GATES, _picture, _print_plane
from comet_moe.experiments.demo.planes import as_letters, as_svg, grid
from comet_moe.experiments.demo.tables import COLUMNS, NOISE, ROWS, TABLES


@pytest.mark.slow
def test_one_epoch_of_the_demo_prints_both_decisions_and_draws_both_planes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = succeed("demo", "--epochs", "1", "--seeds", "1", "--workers", "1", "--json")
    message = done.json
    assert message["page"] == "demo.html"
    assert {path.name for path in tmp_path.iterdir()} <= {"demo.html", "cache"}
    page = (tmp_path / "demo.html").read_text()
    assert "<h1>Where routing pays, and where it does not: two made-up tables</h1>" in page
    assert page.count("the expert of each point") == 2
    assert [table["name"] for table in message["tables"]] == ["four-regions", "one-formula"]
    for table in message["tables"]:
        assert [row["gate"] for row in table["rows"]] == list(GATES)
        assert all(f"{row['test_loss_mean']:.2f}" in page for row in table["rows"])
        assert table["recommendation"].startswith("Use ")
        assert table["rows"][-1]["routing_gain_mean"] is not None
        assert {len(line) for line in table["plane"]} == {30}
    assert "comet 0: validation loss" in done.err


def test_a_wrong_option_is_exit_2_and_no_traceback():
    assert "epochs" in refusal("demo", "--epochs", "0")
    assert ".html" in refusal("demo", "--page", "demo.pdf")


def test_a_made_up_table_is_its_formula_and_noise_and_the_same_each_time(tmp_path):
    for table in TABLES:
        rows = pd.read_csv(table.write(tmp_path))
        again = pd.read_csv(table.write(tmp_path))
        assert rows.equals(again)
        assert len(rows) == ROWS
        noise = rows["target"] - table.formula(rows[list(COLUMNS)].to_numpy())
        assert noise.std() == pytest.approx(NOISE, rel=0.05)


def test_the_grid_starts_at_the_top_left():
    points = grid(2, 3)
    assert points[0] == pytest.approx([-2 / 3, 0.5])
    assert points[-1] == pytest.approx([2 / 3, -0.5])


def test_a_plane_is_drawn_as_letters_and_in_colors(capsys):
    experts = np.array([[0, 0, 1], [2, 2, 1]])
    assert as_letters(experts) == ["AAB", "CCB"]
    drawn = as_svg(np.arange(6.0).reshape(2, 3), experts, "a plane")
    assert len(re.findall("<path", drawn)) == 6 + 3  # a path per shade, and per expert
    _print_plane(["AAB", "CCB"], "comet")
    assert "  AAB\n  CCB\n" in capsys.readouterr().out


def test_without_a_mixture_nothing_is_drawn():
    assert _picture(SimpleNamespace(run=None)) == ""
