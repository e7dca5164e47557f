"""The queue on SQLite and PostgreSQL: each trial is claimed once, and none is lost."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial, partialmethod

import optuna
import pytest
import sqlalchemy

from comet_moe.exceptions import MissingExtraError, StudyError
from comet_moe.experiments.studies import storage
from comet_moe.experiments.studies.defaults import MAX_LOST_WORKERS
from comet_moe.experiments.studies.definition import define_study
from comet_moe.experiments.studies.queue import TrialQueue
from comet_moe.experiments.studies.records import RESULT_FIELDS
from comet_moe.experiments.studies.storage import STORAGE_ERRORS, Storage, without_password
from comet_moe.experiments.training.records import ResultRecord
from forked import server_context
from storages import NEEDS_POSTGRES

RESULT = ResultRecord(
    status="complete",
    validation_loss=1.5,
    test_loss=2.5,
    experts_per_sample=2.0,
    flops_per_sample=10.0,
    parameters=7,
    epochs=3,
    best_epoch=2,
    seconds=0.1,
    tasks={"rating": {"mse": 0.5, "loss": 0.5}},
)


def create_queue(url, trials=2, gates=("topk", "comet"), heartbeat=10):
    queue = TrialQueue(Storage(url, heartbeat), "study")
    return queue, queue.create(define_study("tuning", "multidigits", list(gates), trials))


def claim_waiting(queue, definition):
    claims = []
    while (claim := queue.claim(definition)) is not None:
        claims.append(claim)
    return claims


def test_trials_are_claimed_once_in_order_of_their_index(storage_url):
    queue, definition = create_queue(storage_url)
    claims = [(claim.gate, claim.index) for claim in claim_waiting(queue, definition)]
    assert claims == [("topk", 0), ("comet", 0), ("topk", 1), ("comet", 1)]
    assert queue.count_unfinished(definition) == 4
    assert queue.claim(definition) is None


def test_trials_of_some_gates_are_claimed_in_their_order(storage_url):
    queue, definition = create_queue(storage_url, gates=("topk", "comet", "dense"))
    some = ["dense", "topk"]
    claims = [queue.claim(definition, some) for _ in range(4)]
    assert [(claim.gate, claim.index) for claim in claims] == [
        ("dense", 0),
        ("topk", 0),
        ("dense", 1),
        ("topk", 1),
    ]
    assert queue.claim(definition, some) is None
    for claim in claims:
        queue.finish(claim, RESULT)
    assert (queue.count_unfinished(definition, some), queue.count_unfinished(definition)) == (0, 2)


def test_results_and_reasons_of_failures_are_stored(storage_url):
    queue, definition = create_queue(storage_url)
    claims = claim_waiting(queue, definition)
    queue.report(claims[0], 1, 3.0)
    queue.finish(claims[0], RESULT)
    queue.finish(claims[1], ResultRecord(status="failed", reason="the loss is nan at step 3 of epoch 1"))
    queue.finish(claims[2], ResultRecord(status="failed", reason="out of memory"))
    assert queue.count_unfinished(definition) == 1
    records = TrialQueue(queue.storage, "study").records(definition)
    trials = {(record.gate, record.index): record for record in records}
    assert list(trials) == [("topk", 0), ("topk", 1), ("comet", 0), ("comet", 1)]
    complete = trials["topk", 0]
    assert complete.model_dump(include=set(RESULT_FIELDS)) == RESULT.model_dump(include=set(RESULT_FIELDS))
    assert complete.params == {**definition.sampled_values("topk", 0), "seed": 0}
    failed = trials["comet", 0]
    assert (failed.status, failed.reason) == ("failed", "the loss is nan at step 3 of epoch 1")
    assert (failed.validation_loss, failed.test_loss, failed.tasks) == (None, None, {})
    assert trials["topk", 1].reason == "out of memory"
    assert trials["comet", 1].status == "running"


@pytest.mark.parametrize("status", ["complete", "pruned"])
def test_a_worker_that_is_killed_while_it_stores_a_result_has_not_failed(storage_url, monkeypatch, status):
    queue, definition = create_queue(storage_url, trials=1, gates=["topk"])
    result = RESULT.model_copy(update={"status": status, "reason": "pruned after epoch 1 by median"})
    claim = queue.claim(definition)
    with monkeypatch.context() as patch:
        patch.setattr(queue.storage.optuna, "set_trial_state_values", interrupt)
        with pytest.raises(KeyboardInterrupt):
            queue.finish(claim, result)
    queue.mark_lost(claim)
    assert queue.records(definition)[0].status == "waiting"
    queue.finish(queue.claim(definition), result)
    (trial,) = queue.records(definition)
    assert (trial.status, trial.attempts, trial.epochs) == (status, 2, RESULT.epochs)


def interrupt(*arguments, **options):
    raise KeyboardInterrupt


def test_an_epoch_without_a_finite_loss_can_be_reported(storage_url):
    queue, definition = create_queue(storage_url, trials=1, gates=["topk"])
    queue.report(queue.claim(definition), 1, None)


def test_a_trial_whose_heartbeat_stops_is_run_again(storage_url):
    queue, definition = create_queue(storage_url, trials=1, gates=["topk"], heartbeat=3600)
    stale = queue.claim(definition)
    queue.send_heartbeat(stale)
    assert queue.claim(definition) is None
    with queue.storage.optuna.engine.begin() as connection:  # as if the worker had been silent since then
        connection.execute(sqlalchemy.text("UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00'"))
    claim = queue.claim(definition)
    assert (claim.gate, claim.index) == (stale.gate, stale.index)
    queue.finish(
        stale, RESULT.model_copy(update={"test_loss": 99.0})
    )  # its worker was alive, but is too late
    queue.finish(claim, RESULT)
    (trial,) = queue.records(definition)
    assert (trial.status, trial.attempts, trial.test_loss) == ("complete", 2, 2.5)


@pytest.mark.parametrize("year", [2000, 2100])
def test_a_clock_that_jumps_lets_no_trial_count_twice_or_get_lost(storage_url, year):
    queue, definition = create_queue(storage_url, trials=4, gates=["topk"], heartbeat=3600)
    goes_on, dies = (queue.claim(definition) for _ in range(2))
    with queue.storage.optuna.engine.begin() as connection:  # heartbeats of before the jump
        moved = f"UPDATE trial_heartbeats SET heartbeat = '{year}-01-01 00:00:00'"
        connection.execute(sqlalchemy.text(moved))
    queue.mark_lost(dies)  # the process that started the worker sees its end
    claims = claim_waiting(queue, definition)
    assert {claim.index for claim in claims} >= {1, 2, 3}
    for claim in (goes_on, *claims):
        queue.finish(claim, RESULT)
    assert [trial.status for trial in queue.records(definition)] == ["complete"] * 4
    states = [
        trial.state.name
        for trial in optuna.load_study(study_name="study/topk", storage=queue.storage.optuna).trials
    ]
    assert states.count("COMPLETE") == 4
    assert "RUNNING" not in states
    assert claim_waiting(queue, definition) == []


def test_a_released_trial_is_run_again_any_number_of_times(storage_url):
    queue, definition = create_queue(storage_url, trials=1, gates=["topk"])
    for _ in range(MAX_LOST_WORKERS + 2):
        queue.release(queue.claim(definition))
        assert queue.count_unfinished(definition) == 1
    assert queue.records(definition)[0].status == "waiting"


def test_a_finished_trial_that_is_opened_again_is_run_again_and_counts_from_its_last_result(storage_url):
    queue, definition = create_queue(storage_url, trials=1, gates=["topk"])
    for loss in (9.0, 5.0):
        queue.finish(queue.claim(definition), RESULT.model_copy(update={"validation_loss": loss}))
        assert queue.records(definition)[0].validation_loss == loss
        queue.reopen("topk", 0)
        assert (queue.count_unfinished(definition), queue.records(definition)[0].status) == (1, "waiting")
    queue.release(queue.claim(definition))
    queue.finish(queue.claim(definition), RESULT)
    for reader in (queue, TrialQueue(queue.storage, "study")):
        assert reader.records(definition)[0].validation_loss == RESULT.validation_loss


def test_a_process_that_is_stopped_releases_what_it_has_claimed(storage_url, monkeypatch):
    queue, definition = create_queue(storage_url, trials=3, gates=["topk"])
    queue.finish(queue.claim(definition), RESULT)
    queue.claim(definition)
    with monkeypatch.context() as patch:
        patch.setattr(optuna.Trial, "set_user_attr", interrupt)  # in the middle of a claim
        with pytest.raises(KeyboardInterrupt):
            queue.claim(definition)
    queue.release_all()
    assert [record.status for record in queue.records(definition)] == ["complete", "waiting", "waiting"]


def test_a_trial_that_loses_too_many_workers_counts_as_failed(storage_url):
    queue, definition = create_queue(storage_url, trials=1, gates=["topk"])
    for attempt in range(MAX_LOST_WORKERS):
        queue.mark_lost(queue.claim(definition))
        assert queue.count_unfinished(definition) == (attempt + 1 < MAX_LOST_WORKERS)
    (trial,) = queue.records(definition)
    assert (trial.status, trial.reason) == (
        "failed",
        f"lost {MAX_LOST_WORKERS} workers without finishing an epoch",
    )


def test_added_trials_follow_the_planned_ones(storage_url):
    queue, definition = create_queue(storage_url, trials=1, gates=["topk"])
    queue.finish(queue.claim(definition), RESULT)
    definition = TrialQueue(queue.storage, "study").extend(trials=2)
    assert definition.trials == 3
    assert queue.definition() == definition
    assert queue.count_unfinished(definition) == 2
    assert [claim.index for claim in claim_waiting(queue, definition)] == [1, 2]


def test_added_gates_follow_the_planned_ones(storage_url):
    queue, definition = create_queue(storage_url, trials=2, gates=["topk"])
    queue.finish(queue.claim(definition), RESULT)
    added = define_study("tuning", "multidigits", ["dense", "comet"], 2)
    extended = TrialQueue(queue.storage, "study").extend(gates=added)
    assert extended.gates == ["topk", "dense", "comet"]
    assert {gate: extended.base[gate] for gate in added.gates} == added.base
    assert queue.definition() == extended
    assert queue.count_unfinished(extended) == 5
    claims = [(claim.gate, claim.index) for claim in claim_waiting(queue, extended)]
    assert claims == [("dense", 0), ("comet", 0), ("topk", 1), ("dense", 1), ("comet", 1)]


def test_a_gate_that_two_machines_add_stays_as_the_first_has_added_it(storage_url):
    queue, _ = create_queue(storage_url, trials=1, gates=["topk"])
    first, second = (
        define_study("tuning", "multidigits", ["dense"], 1, settings=[f"training.epochs={epochs}"])
        for epochs in (2, 3)
    )
    queue.extend(gates=first)
    assert TrialQueue(queue.storage, "study").extend(gates=second).base["dense"].training.epochs == 2


def test_a_kill_while_gates_are_added_leaves_a_study_that_runs(storage_url, monkeypatch):
    queue, _ = create_queue(storage_url, trials=1, gates=["topk", "comet"])
    added = define_study("tuning", "multidigits", ["dense", "softmax"], 1)
    calls = {"create_study": optuna.create_study, "set_user_attr": optuna.Study.set_user_attr}
    for killed_at in range(8):  # four studies are opened, then four definitions are written
        steps = iter(range(killed_at))

        def step(name, *args, steps=steps, **kwargs):
            if next(steps, None) is None:
                raise KeyboardInterrupt
            return calls[name](*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(optuna, "create_study", partial(step, "create_study"))
            patch.setattr(optuna.Study, "set_user_attr", partialmethod(partial(step, "set_user_attr")))
            with pytest.raises(KeyboardInterrupt):
                queue.extend(gates=added)
        resumed = TrialQueue(queue.storage, "study")
        definition = resumed.definition()
        assert resumed.count_unfinished(definition) == len(definition.gates)
    assert definition.gates == ["topk", "comet", "dense", "softmax"]


def claim_all(url, taken):
    queue = TrialQueue(Storage(url), "study")
    definition = queue.create(define_study("tuning", "multidigits", ["topk", "comet"], 6))
    while (claim := queue.claim(definition)) is not None:
        taken.put((claim.gate, claim.index))
        queue.finish(claim, RESULT)


@pytest.mark.slow
def test_processes_that_start_together_share_the_trials(storage_url):
    context = server_context()
    taken = context.Queue()
    processes = [context.Process(target=claim_all, args=(storage_url, taken)) for _ in range(3)]
    for process in processes:
        process.start()
    claims = [taken.get() for _ in range(12)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert taken.empty()
    assert sorted(claims) == [(gate, index) for gate in ("comet", "topk") for index in range(6)]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "mysql://me@host/db",
            "storage must be sqlite:///FILE or postgresql://USER@HOST/DATABASE, got 'mysql",
        ),
        ("sqlite://", "storage must be"),
        ("study.sqlite", "storage must be .*, got something that is not a URL"),
        ("postgres//me:secret@host/db", "storage must be"),
        ("postgresql://me:secret@host:port/db", "storage must be"),
        (
            "postgresql://me:secret@127.0.0.1:1/none",
            r"storage postgresql://me@127.0.0.1:1/none cannot be used",
        ),
    ],
)
def test_error_of_an_unusable_storage_does_not_contain_the_password(url, message):
    with pytest.raises(StudyError, match=message) as caught:
        Storage(url)
    assert "secret" not in str(caught.value)


def test_a_missing_postgres_driver_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtraError, match=r"needs psycopg.*pip install 'comet-moe\[postgres\]'"):
        Storage("postgresql://me@127.0.0.1:1/none")


def test_a_file_that_is_not_a_database_is_refused(tmp_path):
    (tmp_path / "trials.sqlite").write_text("no database, but long enough to be looked at" * 30)
    with pytest.raises(StudyError, match="cannot be used: file is not a database"):
        Storage(f"sqlite:///{tmp_path / 'trials.sqlite'}")


def test_passwords_are_removed_from_urls():
    assert without_password("postgresql://me:secret@host/db") == "postgresql://me@host/db"
    assert without_password("postgresql://host/db?password=secret&user=me") == "postgresql://host/db?user=me"


def test_a_study_that_was_created_in_part_is_completed_by_the_next_process(storage_url):
    queue = TrialQueue(Storage(storage_url), "study")
    definition = define_study("tuning", "multidigits", ["topk", "comet"], 2)
    optuna.create_study(storage=queue.storage.optuna, study_name="study/topk")
    assert queue.find_definition() is None
    queue.create(definition)
    optuna.delete_study(study_name="study/comet", storage=queue.storage.optuna)
    again = TrialQueue(Storage(storage_url), "study")
    assert again.create(definition) == definition
    assert again.count_unfinished(definition) == 4


def test_a_worker_that_lost_its_trial_gets_an_error_when_it_reports(storage_url):
    queue, definition = create_queue(storage_url, trials=1, gates=["topk"])
    lost = queue.claim(definition)
    queue.mark_lost(lost)
    assert queue.claim(definition).index == lost.index
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        queue.report(lost, 1, 2.0)


def test_a_trial_that_finishes_an_epoch_each_time_is_not_given_up(storage_url):
    queue, definition = create_queue(storage_url, trials=1, gates=["topk"])
    for epoch in range(MAX_LOST_WORKERS + 1):
        claim = queue.claim(definition)
        queue.report(claim, epoch, 1.0)
        queue.mark_lost(claim)
        assert queue.count_unfinished(definition) == 1


def test_trials_that_were_added_by_hand_are_ignored(storage_url):
    queue, definition = create_queue(storage_url, trials=1, gates=["topk"])
    study = optuna.load_study(study_name="study/topk", storage=queue.storage.optuna)
    study.enqueue_trial({"x": 1})  # by hand, in a dashboard
    queue.finish(queue.claim(definition), RESULT)
    assert queue.claim(definition) is None
    assert queue.count_unfinished(definition) == 0
    with pytest.raises(StudyError, match="cannot contain a slash"):
        TrialQueue(queue.storage, "study/topk")


def test_a_process_sees_what_others_have_added_and_finished_since(storage_url):
    queue, definition = create_queue(storage_url, trials=3, gates=("topk",))
    other = TrialQueue(Storage(storage_url), "study")
    for left in (2, 1, 0):
        other.finish(other.claim(definition), RESULT)
        assert queue.count_unfinished(definition) == left
    assert [record.status for record in queue.records(definition)] == ["complete"] * 3


@pytest.mark.parametrize("step", ["ask", "record_heartbeat"])
def test_a_worker_that_is_killed_while_it_claims_a_trial_has_not_started_it(storage_url, monkeypatch, step):
    queue, definition = create_queue(storage_url, trials=1, gates=["topk"])
    owner = optuna.Study if step == "ask" else queue.storage.optuna
    for _ in range(MAX_LOST_WORKERS + 1):
        with monkeypatch.context() as patch:
            patch.setattr(owner, step, interrupt)
            with pytest.raises(KeyboardInterrupt):
                queue.claim(definition)
        assert queue.records(definition)[0].status == "waiting"
    claim = queue.claim(definition)
    assert (claim.gate, claim.index, queue.claim(definition)) == ("topk", 0, None)
    queue.finish(claim, RESULT)
    (trial,) = queue.records(definition)
    assert (trial.status, trial.attempts, queue.count_unfinished(definition)) == ("complete", 1, 0)


@NEEDS_POSTGRES
def test_lost_connections_are_made_again(postgres_url):
    queue, definition = create_queue(postgres_url, trials=1, gates=["topk"])
    claim = queue.claim(definition)
    end_connections(postgres_url)
    queue.report(claim, 1, 2.0)
    end_connections(postgres_url)
    queue.finish(claim, RESULT)
    end_connections(postgres_url)
    assert queue.records(definition)[0].status == "complete"


@NEEDS_POSTGRES
def test_a_connection_that_is_lost_in_the_middle_of_a_transaction_is_made_again(postgres_url):
    queue, definition = create_queue(postgres_url, trials=1, gates=["topk"])
    queries = []

    @sqlalchemy.event.listens_for(queue.storage.optuna.engine, "before_cursor_execute")
    def end_once(connection, cursor, statement, *_):
        if "FROM trials" in statement and not queries:
            queries.append(statement)
            end_connections(postgres_url)

    assert [record.status for record in queue.records(definition)] == ["waiting"]
    assert queries


@NEEDS_POSTGRES
def test_a_storage_that_is_read_only_for_a_while_is_tried_again(postgres_url, monkeypatch):
    queue, definition = create_queue(postgres_url, trials=1, gates=["topk"])
    claim = queue.claim(definition)
    waits = []

    def allow_writes(seconds):
        waits.append(seconds)
        set_read_only(postgres_url, False)

    set_read_only(postgres_url, True)
    monkeypatch.setattr(storage.time, "sleep", allow_writes)  # the server recovers while the queue waits
    queue.report(claim, 1, 2.0)
    assert waits == [storage.RETRY_SECONDS]


def set_read_only(url, is_read_only):
    with psycopg_connection(url) as connection:
        setting = f"default_transaction_read_only = {is_read_only}"
        connection.execute(f"ALTER DATABASE {url.rsplit('/', 1)[1]} SET {setting}")
    end_connections(url)  # a session keeps the settings that it started with


@NEEDS_POSTGRES
def test_a_storage_that_stays_away_is_given_up(postgres_url, monkeypatch):
    monkeypatch.setattr(storage, "OUTAGE_SECONDS", 0.5)
    monkeypatch.setattr(storage, "RETRY_SECONDS", 0.1)
    queue, definition = create_queue(postgres_url, trials=1, gates=["topk"])
    claim = queue.claim(definition)
    with psycopg_connection(postgres_url) as connection:
        name = postgres_url.rsplit("/", 1)[1]
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        end_connections(postgres_url)
        started = time.monotonic()
        with pytest.raises(STORAGE_ERRORS):
            queue.report(claim, 1, 2.0)
        assert time.monotonic() - started > 0.5
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    queue.report(claim, 1, 2.0)
    assert queue.count_unfinished(definition) == 1


def psycopg_connection(url):
    """To the same server, and to another database."""
    import psycopg

    return psycopg.connect(url.rsplit("/", 1)[0] + "/postgres", autocommit=True)


def end_connections(url):
    """End all connections to the database, as a restart of the server does."""
    with psycopg_connection(url) as connection:
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        connection.execute(end, [url.rsplit("/", 1)[1]])


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts the files in /proc")
def test_calls_of_several_threads_open_no_more_files_than_those_of_one(tmp_path):
    """A heartbeat may overlap with another call: SQLite would keep the files of its connection open."""
    queue, definition = create_queue(f"sqlite:///{tmp_path / 'trials.sqlite'}", trials=1)
    claim = queue.claim(definition)
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(1) as threads:
        heartbeats = [threads.submit(queue.send_heartbeat, claim) for _ in range(30)]
        for epoch in range(30):
            queue.report(claim, epoch, 1.0)
        for heartbeat in heartbeats:
            heartbeat.result()
    assert len(os.listdir("/proc/self/fd")) <= before
