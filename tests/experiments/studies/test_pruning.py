"""Pruning: Optuna's pruners see one trial per index, whatever happened to its workers."""

import json
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from comet_moe.exceptions import StudyError
from comet_moe.experiments.studies.definition import StudyOptions, check_same_study, define_study
from comet_moe.experiments.studies.queue import TrialQueue
from comet_moe.experiments.studies.reading import read_studies
from comet_moe.experiments.studies.records import best_trial
from comet_moe.experiments.studies.storage import Storage
from comet_moe.experiments.studies.tables import compare_gates
from comet_moe.experiments.training.records import ResultRecord

PRUNED = ResultRecord(status="pruned", reason="pruned after epoch 1 by median", epochs=1, seconds=0.5)


def complete(loss):
    return ResultRecord(status="complete", validation_loss=loss, test_loss=loss, epochs=4)


def create_queue(url, prune, trials=8):
    queue = TrialQueue(Storage(url), "study")
    settings = ["training.epochs=9"]
    definition = queue.create(
        define_study("tuning", "multidigits", ["topk"], trials, settings=settings, prune=prune)
    )
    return queue, definition


def train(queue, definition, losses):
    """Train a trial as a worker does; its index, and the epoch after which it was pruned or None."""
    claim = queue.claim(definition)
    for epoch in range(1, len(losses) + 1):
        queue.report(claim, epoch, losses[epoch - 1])
        if queue.should_prune(definition, claim, dict(enumerate(losses[:epoch], 1))):
            queue.finish(claim, PRUNED)
            return claim.index, epoch
    queue.finish(claim, complete(losses[-1]))
    return claim.index, None


def test_median_prunes_after_five_complete_trials_what_is_worse_than_half_of_them(storage_url):
    queue, definition = create_queue(storage_url, "median")
    for index in range(5):
        assert train(queue, definition, [9.0 + index, 5.0 + index]) == (index, None)
    assert train(queue, definition, [11.0, 7.1]) == (5, 2)  # medians of epoch 1 and 2: 11 and 7
    assert train(queue, definition, [12.0, 3.0]) == (6, 1)
    assert train(queue, definition, [10.0, 6.9]) == (7, None)
    assert queue.count_unfinished(definition) == 0
    assert queue.claim(definition) is None
    records = queue.records(definition)
    assert [record.status for record in records] == ["complete"] * 5 + ["pruned"] * 2 + ["complete"]
    assert (records[5].reason, records[5].epochs, records[5].validation_loss) == (PRUNED.reason, 1, None)
    assert best_trial(records, "topk").index == 0
    study = optuna.load_study(study_name="study/topk", storage=queue.storage.optuna)
    states = [trial.state for trial in study.get_trials()]
    assert states.count(TrialState.PRUNED) == 2


@pytest.mark.slow
@pytest.mark.parametrize("prune", ["median", "hyperband"])
def test_killed_workers_do_not_change_what_is_pruned(tmp_path, prune):
    runs = [[10.0 - (7 * index) % 5 - epoch for epoch in range(3)] for index in range(8)]
    whole = create_queue(f"sqlite:///{tmp_path / 'whole.sqlite'}", prune)
    expected = [train(*whole, losses) for losses in runs]
    queue, definition = create_queue(f"sqlite:///{tmp_path / 'killed.sqlite'}", prune)
    pruned = [train_with_kills(queue, definition, losses) for losses in runs]
    assert pruned == expected
    assert {epoch is None for _, epoch in pruned} == {True, False}


def train_with_kills(queue, definition, losses):
    """As `train`, by a worker that is killed in each epoch, before or after the decision to prune."""
    claim = queue.claim(definition)
    for epoch in range(1, len(losses) + 1):
        so_far = dict(enumerate(losses[:epoch], 1))
        queue.report(claim, epoch, losses[epoch - 1])
        if (claim.index + epoch) % 2:
            queue.should_prune(definition, claim, so_far)
        queue.mark_lost(claim)
        claim = queue.claim(definition)  # the run resumes from its checkpoint, and is asked again
        if queue.should_prune(definition, claim, so_far):
            queue.finish(claim, PRUNED)
            return claim.index, epoch
    queue.finish(claim, complete(losses[-1]))
    return claim.index, None


def test_a_worker_that_lost_its_trial_cannot_prune_it(storage_url):
    queue, definition = create_queue(storage_url, "hyperband", trials=1)
    lost = queue.claim(definition)
    queue.mark_lost(lost)
    claim = queue.claim(definition)
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        queue.should_prune(definition, lost, dict.fromkeys(range(1, 10), 1.0))
    queue.finish(lost, PRUNED)
    assert queue.records(definition)[0].status == "running"
    queue.finish(claim, complete(1.0))
    assert queue.records(definition)[0].status == "complete"


def test_the_pruner_of_a_study_cannot_be_changed():
    saved = define_study("tuning", "multidigits", ["topk"], 1, prune="median")
    options = StudyOptions("tuning", "multidigits", Path("study"))
    check_same_study(saved, options)
    check_same_study(saved, replace(options, prune="median"))
    with pytest.raises(StudyError, match="prunes by median, got --prune hyperband: leave it out, or choose"):
        check_same_study(saved, replace(options, prune="hyperband"))
    with pytest.raises(StudyError, match="the saved study prunes no trials, got --prune median"):
        check_same_study(saved.model_copy(update={"prune": None}), replace(options, prune="median"))


def test_pruned_trials_are_left_out_of_tables(tmp_path):
    queue, definition = create_queue(f"sqlite:///{tmp_path / 'trials.sqlite'}", "median")
    for index in range(5):
        train(queue, definition, [1.0 + index])
    train(queue, definition, [99.0])
    record = {"kind": "tuning", "name": "study", "recipe": "multidigits", "gates": ["topk"], "trials": 6}
    (tmp_path / "study.json").write_text(json.dumps(record))
    lines = [record.model_dump_json() for record in queue.records(definition)[:6]]
    (tmp_path / "trials.jsonl").write_text("\n".join(lines))
    (study,) = read_studies([tmp_path])
    (row,) = compare_gates(study, top_percent=100)
    assert (row["trials_complete"], row["trials_pruned"], row["trials_failed"]) == (5, 1, 0)
    assert (row["trials_used"], row["test_loss_mean"]) == (5, 3.0)
    assert study.num_unfinished == 0
    assert study.left_out()[0].startswith("study: 1 of 6 trials were pruned and are not included")
