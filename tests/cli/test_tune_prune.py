"""``comet-moe tune --prune``: poor trials are really stopped, and count nowhere."""

import json
import signal

import numpy as np
import pytest
from command import refusal, succeed
from test_tune import arguments, end_workers, results, succeed_beside, trials

TRIALS, EPOCHS, STARTUP = 8, 3, 5
SETTINGS = [f"training.epochs={EPOCHS}"]


def words(out, *more):
    options = ("--gates", "topk", "--trials", TRIALS, "--workers", 1, "--json")
    return arguments("tune", out, *options, *more, settings=SETTINGS)


def losses(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["validation"]["loss"] for line in lines]


def median_rule(runs):
    """The epoch after which each run is pruned, None for never, by the definition of the median rule."""
    complete, pruned = [], []
    for run in runs:
        is_late = len(complete) >= STARTUP
        medians = np.median(np.array(complete), 0) if is_late else [np.inf] * EPOCHS
        worse = [epoch for epoch in range(1, EPOCHS) if min(run[:epoch]) > medians[epoch - 1]]
        pruned.append(worse[0] if worse else None)
        if not worse:
            complete.append(run)
    return pruned


@pytest.mark.slow
def test_pruned_trials_are_marked_left_out_and_not_repeated(tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "study"
    succeed(*words(whole))
    expected = median_rule([losses(whole / row["run"]) for row in trials(whole)])
    assert any(expected), "the test needs a trial that is pruned"
    late = ("topk-005", "topk-006", "topk-007")
    done = succeed_beside(
        lambda has_ended: end_workers(out, signal.SIGKILL, has_ended, is_meant=late.__contains__),
        *words(out, "--prune", "median"),
    )
    (summary,) = done.json["rows"]

    rows = trials(out)
    assert [row["epochs"] if row["status"] == "pruned" else None for row in rows] == expected
    unpruned = [index for index, epoch in enumerate(expected) if epoch is None]
    without, of_prune = results(whole), results(out)
    assert [of_prune[index] for index in unpruned] == [without[index] for index in unpruned]
    for row in rows:
        if row["status"] == "pruned":
            assert row["reason"] == f"pruned after epoch {row['epochs']} by median"
            assert len(losses(out / row["run"])) == row["epochs"]
            assert (row["validation_loss"], row["test_loss"]) == (None, None)
            assert not (out / row["run"] / "checkpoint").exists()
    num_pruned = TRIALS - len(unpruned)
    assert (summary["trials_complete"], summary["trials_pruned"]) == (len(unpruned), num_pruned)
    best = min(unpruned, key=lambda index: rows[index]["validation_loss"])
    assert summary["best_run"] == rows[best]["run"]

    done = succeed("table", out, "--top", 100)
    assert f"{num_pruned} of {TRIALS} trials were pruned and are not included" in done.err
    (row,) = succeed("table", out, "--top", 100, "--json").json["rows"]
    kept = [rows[index]["test_loss"] for index in unpruned]
    assert (row["trials_used"], row["trials_pruned"]) == (len(unpruned), num_pruned)
    assert row["test_loss_mean"] == pytest.approx(sum(kept) / len(kept), rel=1e-12)
    curve = succeed("curves", out, "--json").json["rows"]
    assert {(point["trials"], point["trials_pruned"]) for point in curve} == {(len(unpruned), num_pruned)}
    succeed("report", out, "-o", tmp_path / "page.html")
    assert f"{num_pruned} of {TRIALS} trials were pruned" in (tmp_path / "page.html").read_text()

    before = (out / "trials.jsonl").read_text()
    succeed(*words(out, "--resume"))
    assert (out / "trials.jsonl").read_text() == before
    message = refusal(*words(out, "--resume", "--prune", "hyperband"))
    assert "the saved study prunes by median, got --prune hyperband: leave it out" in message
    pruned_run = next(row["run"] for row in rows if row["status"] == "pruned")
    assert "pruned after epoch" in refusal("evaluate", out / pruned_run)
