"""``comet-moe demo``."""

import pytest
from command import refusal, succeed

from comet_moe.cli.demo import _print


@pytest.mark.slow
def test_one_epoch_of_the_demo_prints_one_json_object_and_writes_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = succeed("demo", "--epochs", "1", "--json")
    message = done.json
    assert message["page"] == "demo.html"
    assert [path.name for path in tmp_path.iterdir()] == ["demo.html"]
    page = (tmp_path / "demo.html").read_text()
    rows = message["rows"]
    assert all(f"{row['test_loss']:.2f}" in page for row in rows)
    assert [row["gate"] for row in rows] == [
        "dense",
        "softmax",
        "topk",
        "topk+",
        "dselect",
        "comet",
        "comet+",
    ]
    for row in rows:
        assert row["accuracy"].keys() == {"top_left", "bottom_right"}
        assert all(0 < share < 1 for share in row["accuracy"].values())
        assert 0 < row["test_loss"] < 1000
    assert rows[0]["routing"] == ["dense"]
    assert rows[0]["information"] == {"top_left": 0, "bottom_right": 0}
    assert rows[2]["experts_per_sample"] == 2
    assert rows[2]["routing"] == ["routes"]
    assert "inverted" in page  # the kinds, against which the experts are shown
    assert "topk+: test loss" in done.err


def test_a_wrong_option_is_exit_2_and_no_traceback():
    assert "epochs" in refusal("demo", "--epochs", "0")


def test_a_failed_run_has_its_row_in_the_table(capsys):
    failed = {"gate": "comet", "test_loss": None, "accuracy": {}, "experts_per_sample": None}
    failed |= {"information": {}, "routing": [], "seconds": 1.0}
    _print([failed])
    assert "failed" in capsys.readouterr().out
