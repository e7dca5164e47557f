"""The queue on real storages: each trial is claimed once, and none is lost."""

import multiprocessing
import time

import optuna
import pytest

from comet_moe.exceptions import StudyError
from comet_moe.tuning import Queue, Storage, define
from comet_moe.tuning.queue import AHEAD, ATTEMPTS, Lost
from comet_moe.tuning.storage import without_password

RESULT = {
    "status": "complete",
    "validation_loss": 1.5,
    "test_loss": 2.5,
    "experts_per_sample": 2.0,
    "flops_per_sample": 10.0,
    "parameters": 7,
    "epochs": 3,
    "best_epoch": 2,
    "seconds": 0.1,
    "tasks": {"rating": {"mse": 0.5, "loss": 0.5}},
}


def started(url, trials=2, gates=("topk", "comet"), heartbeat=10):
    queue = Queue(Storage(url, heartbeat), "study")
    definition = queue.start(define("tuning", "multidigits", list(gates), trials))
    queue.fill(definition)
    return queue, definition


def claimed(queue, definition):
    claims = []
    while (claim := queue.claim(definition)) is not None:
        claims.append(claim)
    return claims


def test_trials_are_claimed_by_index_and_once(storage_url):
    queue, definition = started(storage_url)
    claims = [(claim.gate, claim.index) for claim in claimed(queue, definition)]
    assert claims == [("topk", 0), ("comet", 0), ("topk", 1), ("comet", 1)]
    assert queue.fill(definition) == 4
    assert queue.claim(definition) is None


def test_a_result_is_kept_and_a_failure_with_its_reason(storage_url):
    queue, definition = started(storage_url)
    claims = claimed(queue, definition)
    queue.report(claims[0], 1, 3.0)
    queue.finish(claims[0], RESULT)
    queue.finish(claims[1], {"status": "failed", "reason": "the loss is nan at step 3 of epoch 1"})
    queue.fail(claims[2], "out of memory")
    assert queue.fill(definition) == 1
    rows = {(row["gate"], row["index"]): row for row in Queue(queue.storage, "study").rows(definition)}
    assert list(rows) == [("topk", 0), ("topk", 1), ("comet", 0), ("comet", 1)]
    best = rows["topk", 0]
    assert best["status"] == "complete"
    assert {name: best[name] for name in RESULT if name != "status"} == {
        name: value for name, value in RESULT.items() if name != "status"
    }
    assert best["params"] == {**definition.values("topk", 0), "seed": 0}
    failed = rows["comet", 0]
    assert (failed["status"], failed["reason"]) == ("failed", "the loss is nan at step 3 of epoch 1")
    assert (failed["validation_loss"], failed["test_loss"], failed["tasks"]) == (None, None, {})
    assert rows["topk", 1]["reason"] == "out of memory"
    assert rows["comet", 1]["status"] == "running"


def test_a_trial_without_a_sign_of_life_is_run_again(storage_url):
    queue, definition = started(storage_url, trials=1, gates=["topk"], heartbeat=1)
    lost = queue.claim(definition)
    alive = time.monotonic() + 3
    while time.monotonic() < alive:
        queue.beat(lost)
        assert queue.fill(definition) == 1
        assert queue.claim(definition) is None
        time.sleep(0.5)
    deadline = time.monotonic() + 30
    while (claim := queue.claim(definition)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        queue.fill(definition)
    assert (claim.gate, claim.index) == (lost.gate, lost.index)
    queue.finish(lost, {**RESULT, "test_loss": 99.0})  # it lives after all, and comes too late
    queue.finish(claim, RESULT)
    (row,) = queue.rows(definition)
    assert (row["status"], row["attempts"], row["test_loss"]) == ("complete", 2, 2.5)


def test_a_trial_that_is_handed_back_is_run_again_however_often(storage_url):
    queue, definition = started(storage_url, trials=1, gates=["topk"])
    for _ in range(ATTEMPTS + 2):
        queue.hand_back(queue.claim(definition))
        assert queue.fill(definition) == 1
    assert queue.rows(definition)[0]["status"] == "waiting"


def test_a_trial_that_loses_its_worker_again_and_again_counts_as_failed(storage_url):
    queue, definition = started(storage_url, trials=1, gates=["topk"])
    for attempt in range(ATTEMPTS):
        queue.lose(queue.claim(definition))
        assert queue.fill(definition) == (attempt + 1 < ATTEMPTS)
    (row,) = queue.rows(definition)
    assert (row["status"], row["reason"]) == ("failed", f"its worker was lost {ATTEMPTS} times")


def test_more_trials_than_wait_at_a_time_all_run_once(storage_url):
    trials = AHEAD + 3
    queue, definition = started(storage_url, trials=trials, gates=["topk"])
    indices = []
    while queue.fill(definition):
        for claim in claimed(queue, definition):
            indices.append(claim.index)
            queue.finish(claim, RESULT)
    assert indices == list(range(trials))


def test_added_trials_follow_those_that_were_asked_for(storage_url):
    queue, definition = started(storage_url, trials=1, gates=["topk"])
    queue.finish(queue.claim(definition), RESULT)
    definition = Queue(queue.storage, "study").add(2)
    assert definition.trials == 3
    assert queue.definition() == definition
    assert queue.fill(definition) == 2
    assert [claim.index for claim in claimed(queue, definition)] == [1, 2]


def claim_all(url, taken):
    queue = Queue(Storage(url), "study")
    definition = queue.start(define("tuning", "multidigits", ["topk", "comet"], 6))
    while queue.fill(definition) and (claim := queue.claim(definition)) is not None:
        taken.put((claim.gate, claim.index))
        queue.finish(claim, RESULT)


def test_processes_that_start_at_once_share_the_trials(storage_url):
    context = multiprocessing.get_context("spawn")
    taken = context.Queue()
    processes = [context.Process(target=claim_all, args=(storage_url, taken)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [taken.get(timeout=120) for _ in range(12)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert taken.empty()
    assert sorted(found) == [(gate, index) for gate in ("comet", "topk") for index in range(6)]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (
            "mysql://me@host/db",
            "storage must be sqlite:///FILE or postgresql://USER@HOST/DATABASE, got 'mysql",
        ),
        ("sqlite://", "storage must be"),
        ("study.sqlite", "storage must be .*, and what was given is no URL"),
        ("postgres//me:secret@host/db", "storage must be"),
        ("postgresql://me:secret@host:port/db", "storage must be"),
        (
            "postgresql://me:secret@127.0.0.1:1/none",
            r"storage postgresql://me@127.0.0.1:1/none cannot be used",
        ),
    ],
)
def test_a_storage_that_cannot_be_used_is_named_without_its_password(url, says):
    with pytest.raises(StudyError, match=says) as caught:
        Storage(url)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "trials.sqlite").write_text("no database, but long enough to be looked at" * 30)
    with pytest.raises(StudyError, match="cannot be used: file is not a database"):
        Storage(f"sqlite:///{tmp_path / 'trials.sqlite'}")


def test_a_password_is_not_written_down():
    assert without_password("postgresql://me:secret@host/db") == "postgresql://me@host/db"
    assert without_password("postgresql://host/db?password=secret&user=me") == "postgresql://host/db?user=me"


def test_a_start_that_was_killed_half_way_is_finished_by_the_next(storage_url):
    queue = Queue(Storage(storage_url), "study")
    definition = define("tuning", "multidigits", ["topk", "comet"], 2)
    optuna.create_study(storage=queue.storage.tables, study_name="study/topk")
    assert queue.definition() is None
    queue.start(definition)
    optuna.delete_study(study_name="study/comet", storage=queue.storage.tables)
    again = Queue(Storage(storage_url), "study")
    assert again.start(definition) == definition
    assert again.fill(definition) == 4


def test_a_worker_learns_that_its_trial_is_another_ones_now(storage_url):
    queue, definition = started(storage_url, trials=1, gates=["topk"])
    lost = queue.claim(definition)
    queue.lose(lost)
    queue.fill(definition)
    assert queue.claim(definition).index == lost.index
    with pytest.raises(Lost):
        queue.report(lost, 1, 2.0)


def test_a_trial_that_gets_further_each_time_is_not_given_up(storage_url):
    queue, definition = started(storage_url, trials=1, gates=["topk"])
    for epoch in range(ATTEMPTS + 1):
        claim = queue.claim(definition)
        queue.report(claim, epoch, 1.0)
        queue.lose(claim)
        assert queue.fill(definition) == 1


def test_trials_of_others_in_the_same_storage_are_left_alone(storage_url):
    queue, definition = started(storage_url, trials=1, gates=["topk"])
    study = optuna.load_study(study_name="study/topk", storage=queue.storage.tables)
    study.enqueue_trial({"x": 1})  # by hand, in a dashboard
    queue.finish(queue.claim(definition), RESULT)
    assert queue.claim(definition) is None
    assert queue.fill(definition) == 0
    with pytest.raises(StudyError, match="must not hold a slash"):
        Queue(queue.storage, "study/topk")
