"""`comet-moe table` and `comet-moe curves`, as a user calls them."""

import csv
import io
import json

import numpy as np
import pytest
from command import comet_moe, refusal, succeed
from made_studies import GATES, random_trials, waiting, write_study
from raw_sets import SMALL_DIGITS, sets
from scipy.stats import sem


@pytest.fixture
def study(tmp_path):
    return write_study(tmp_path / "study", random_trials(GATES, 60, failed=3))


def test_table_prints_one_row_per_gate_as_json(study):
    done = succeed("table", study, "--json")
    assert done.err == ""
    rows = done.json["rows"]
    assert [row["gate"] for row in rows] == GATES
    lines = [json.loads(line) for line in (study / "trials.jsonl").read_text().splitlines()]
    for row in rows:
        assert (row["trials_complete"], row["trials_failed"], row["trials_used"]) == (57, 3, 3)
        complete = [line for line in lines if line["gate"] == row["gate"] and line["status"] == "complete"]
        best = sorted(complete, key=lambda line: line["validation_loss"])[:3]
        assert row["test_loss_mean"] == pytest.approx(np.mean([line["test_loss"] for line in best]))
        assert row["test_loss_se"] == pytest.approx(sem([line["test_loss"] for line in best]))
    assert rows[0]["p_existing"] is rows[0]["p_dense"] is None
    assert rows[0]["verdict"] == "routes / static"
    assert rows[0]["routing"]["top_left"]["information_mean"] == 1.2


def test_gates_are_tested_against_the_network_without_a_mixture(tmp_path):
    folder = write_study(tmp_path / "s", random_trials(["dense", "topk", "comet"], 20), kind="ablation")
    dense, topk, comet = succeed("table", folder, "--json").json["rows"]
    assert (dense["p_dense"], dense["significant_dense"]) == (None, None)
    assert comet["p_dense"] < 0.05 < topk["p_dense"]
    text = succeed("table", folder).out
    assert "Does a mixture pay on this data? Yes: " in text
    assert "| p vs dense |" in text


def test_formats_agree(study):
    rows = succeed("table", study, "--json", "--top", "20").json["rows"]
    read = list(csv.DictReader(io.StringIO(succeed("table", study, "--format", "csv", "--top", "20").out)))
    assert [float(line["test_loss_mean"]) for line in read] == [row["test_loss_mean"] for row in rows]
    piped = succeed("table", study, "--top", "20").out
    assert piped == succeed("table", study, "--top", "20", "--format", "md").out
    for row in rows:
        assert f"{row['test_loss_mean']:.2f}" in piped
        assert f"{row['test_loss_mean']:.2f}" in succeed("table", study, "--format", "tex", "--top", "20").out


def test_several_studies_are_printed_in_one_table(study, tmp_path):
    other = write_study(
        tmp_path / "other", random_trials(["hash", "hash+"], 9), kind="ablation", name="search"
    )
    rows = succeed("table", study, other, "--json").json["rows"]
    assert [row["study"] for row in rows] == ["made"] * 6 + ["search"] * 2
    assert [row["trials_used"] for row in rows] == [3] * 6 + [9] * 2
    # one table of results and one of routing, each with a beginning and an end
    assert succeed("table", study, other, "--format", "tex").out.count("tabular") == 4


def test_unfinished_trials_are_reported_on_stderr(tmp_path):
    lines = [*random_trials(["comet"], 4), *(waiting("comet", at) for at in range(4, 10))]
    lines += [waiting("topk", at) for at in range(10)]
    folder = write_study(tmp_path / "s", lines)
    for verb in ("table", "curves"):
        done = succeed(verb, folder, "--json")
        assert "made: 16 of 20 trials are unfinished" in done.err
        assert done.json["rows"][0]["gate"] == "comet"
    assert "topk has no complete trial" in done.err
    assert "| topk | 0/0 |" in succeed("table", folder).out


def test_curves_print_losses_and_speedups(study):
    result = succeed("curves", study, "--json", "--repeats", "100").json
    assert {row["budget"] for row in result["rows"]} == {1, 2, *range(5, 61, 5)}
    assert {(row["gate"], row["baseline"]) for row in result["speedups"]} == {
        ("topk+", "topk"),
        ("comet+", "comet"),
        ("comet", "topk"),
        ("comet", "dselect"),
        ("comet+", "topk"),
        ("comet+", "dselect"),
    }
    text = succeed("curves", study, "--repeats", "100").out
    assert "| trials | softmax | topk | topk+ | dselect | comet | comet+ |" in text
    assert "**made: speedup**" in text
    assert "**made: routing**" in text
    read = list(csv.DictReader(io.StringIO(succeed("curves", study, "--format", "csv").out)))
    assert [float(line["expected"]) for line in read] == [row["expected"] for row in result["rows"]]


def test_pairs_and_seeds_can_be_chosen(study):
    one, same, other = (
        succeed("curves", study, "--json", "--repeats", "50", "--pair", "comet+:softmax", "--seed", seed).json
        for seed in (0, 0, 1)
    )
    assert {(row["gate"], row["baseline"]) for row in one["speedups"]} == {("comet+", "softmax")}
    assert one == same != other


def test_wrong_input_ends_in_one_sentence(study, tmp_path):
    assert "is not a folder" in refusal("table", tmp_path / "none")
    assert "has neither a study" in refusal("curves", tmp_path / "study" / "..")
    assert "the top percentage must be above 0 and at most 100, got 0" in refusal(
        "table", study, "--top", "0"
    )
    assert "a pair has the form GATE:BASELINE, as in comet+:topk, got 'comet'" in refusal(
        "curves", study, "--pair", "comet"
    )
    assert "both comet and hash" in refusal("curves", study, "--pair", "comet:hash")
    lines = study / "trials.jsonl"
    lines.write_text(lines.read_text()[:-20])
    assert "line 360 of" in refusal("table", study)
    assert comet_moe("table", study, "--format", "html").code == 2


@pytest.mark.slow
def test_trained_runs_are_compared_without_a_study(tmp_path):
    settings = sets(SMALL_DIGITS)
    results = {}
    for gate, seed in (("comet", 0), ("comet", 1), ("topk", 0)):
        out = tmp_path / "runs" / f"{gate}-{seed}"
        given = ("--set", f"gate={gate}", "--set", f"seed={seed}", *settings, "--out", out)
        results[gate, seed] = succeed("train", "multidigits", *given, "--json").json
    topk, comet = succeed("table", tmp_path / "runs", "--json").json["rows"]
    assert (topk["gate"], topk["trials_used"], topk["test_loss_se"]) == ("topk", 1, None)
    assert topk["test_loss_mean"] == results["topk", 0]["test_loss"]
    losses = [results["comet", seed]["test_loss"] for seed in (0, 1)]
    assert comet["test_loss_mean"] == pytest.approx(np.mean(losses))
    assert comet["test_loss_se"] == pytest.approx(sem(losses))
    assert (comet["recipe"], comet["experts"]) == ("multidigits", 8)
    accuracies = [results["comet", seed]["tasks"]["top_left"]["accuracy"] for seed in (0, 1)]
    assert comet["metrics"]["top_left.accuracy"]["mean"] == pytest.approx(np.mean(accuracies))
    assert succeed("table", tmp_path / "runs" / "topk-0", "--json").json["rows"] == [topk]
