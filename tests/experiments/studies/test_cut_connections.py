"""A connection to PostgreSQL that is cut, at any statement of any operation, changes nothing in a study.

COMET_MOE_CUTS=1 cuts at every message; by default at every fourth, which takes a quarter of the time.
"""

import os
import uuid

import pytest
from cutting_proxy import CuttingProxy
from sqlalchemy.engine import make_url

from comet_moe.experiments.studies import storage
from comet_moe.experiments.studies.definition import define_study
from comet_moe.experiments.studies.queue import TrialQueue
from comet_moe.experiments.studies.storage import Storage
from comet_moe.experiments.training.records import ResultRecord
from storages import NEEDS_POSTGRES

STEP = int(os.environ.get("COMET_MOE_CUTS", 4))
pytestmark = [pytest.mark.slow, NEEDS_POSTGRES]


def result(status):
    return ResultRecord(
        status=status,
        reason=None if status == "complete" else "as planned",
        validation_loss=1.5,
        test_loss=2.5,
        epochs=3,
        best_epoch=2,
        tasks={"rating": {"mse": 0.5, "loss": 0.5}},
    )


PLAN = define_study("tuning", "multidigits", ["topk"], 2, prune="median")


class Study:
    """A study with one trial that is running and one that waits."""

    def __init__(self, opened):
        self.queue = TrialQueue(opened, uuid.uuid4().hex)
        self.definition = self.queue.create(PLAN)
        self.claim = self.queue.claim(PLAN)

    def end(self, status):
        self.queue.finish(self.claim, result(status))

    def statuses(self):
        return [record.status for record in self.queue.records(PLAN)]


OPERATIONS = {
    "create": (lambda s: s.queue.create(PLAN), ["running", "waiting"]),
    "claim": (lambda s: s.queue.claim(PLAN), ["running", "running"]),
    "report": (lambda s: s.queue.report(s.claim, 1, 2.0), ["running", "waiting"]),
    "prune": (lambda s: s.queue.should_prune(PLAN, s.claim, {1: 2.0}), ["running", "waiting"]),
    "complete": (lambda s: s.end("complete"), ["complete", "waiting"]),
    "lost": (lambda s: s.queue.mark_lost(s.claim), ["waiting", "waiting"]),
    "records": (lambda s: s.queue.records(PLAN), ["running", "waiting"]),
}


@pytest.fixture
def proxy(postgres_url, monkeypatch):
    monkeypatch.setattr(storage, "RETRY_SECONDS", 0.0)
    url = make_url(postgres_url)
    with CuttingProxy(url.host, url.port) as proxy:
        proxy.url = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        yield proxy


@pytest.mark.parametrize("loses_answer", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_cut_at_any_statement_changes_nothing(operation, loses_answer, postgres_url, proxy):
    operate, wanted = OPERATIONS[operation]
    ours, direct = Storage(proxy.url), Storage(postgres_url)
    message, was_cut = 1 - STEP, True
    while was_cut:
        message += STEP
        study = Study(ours)
        proxy.arm(message, loses_answer)
        operate(study)
        was_cut = proxy.disarm()
        others = TrialQueue(direct, study.queue.name)
        found = [record.status for record in others.records(PLAN)]
        assert found == wanted, f"message {message} was cut"
        while (claim := others.claim(PLAN)) is not None:
            others.finish(claim, result("complete"))
        assert others.claim(PLAN) is None
    assert message > 3  # BEGIN, a statement and COMMIT


@pytest.mark.parametrize("loses_answer", [False, True])
def test_a_worker_that_starts_during_a_cut_waits_for_the_storage(loses_answer, postgres_url, proxy):
    Storage(postgres_url)
    message, was_cut = 1 - STEP, True
    while was_cut:
        message += STEP
        proxy.arm(message, loses_answer)
        TrialQueue(Storage(proxy.url, outage_seconds=10.0), "none").find_definition()
        was_cut = proxy.disarm()
    assert message > 3
