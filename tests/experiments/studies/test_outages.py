"""A PostgreSQL that restarts, crashes, or leaves its work to a standby: operations on a study wait for it."""

import time
from types import SimpleNamespace

import psycopg
import pytest
from benchmarks.postgres import Cluster, find_programs
from test_cut_connections import OPERATIONS, Study

from comet_moe.experiments.studies import storage
from comet_moe.experiments.studies.storage import Storage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_programs() is None, reason="no PostgreSQL: install it, as .ci/run does"),
]


@pytest.fixture
def meanwhile(monkeypatch):
    """A function that sets what happens once while the storage is waited for; the waits so far."""
    waits, planned = [], []

    def sleep(seconds):
        waits.append(seconds)
        if planned:
            planned.pop()()

    monkeypatch.setattr(storage, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    return planned.append, waits


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_every_operation_waits_for_a_restart(mode, meanwhile):
    plan, waits = meanwhile
    with Cluster() as cluster:
        opened = Storage(cluster.url)
        for name, (operate, wanted) in OPERATIONS.items():
            study = Study(opened)
            cluster.stop(mode)
            plan(cluster.start)
            before = len(waits)
            operate(study)
            assert len(waits) > before, name
            assert study.statuses() == wanted, name


def test_every_operation_waits_until_the_standby_takes_writes(meanwhile):
    plan, waits = meanwhile
    with Cluster() as primary, Cluster(primary) as standby:
        hosts = "&".join(f"host=127.0.0.1:{cluster.port}" for cluster in (primary, standby))
        opened = Storage(f"postgresql://postgres@/postgres?{hosts}")
        studies = {name: Study(opened) for name in OPERATIONS}
        wait_for_replication(primary, standby)
        primary.stop("immediate")
        with psycopg.connect(standby.url) as connection:
            assert connection.execute("SELECT pg_is_in_recovery()").fetchone()[0]  # it is read-only
        plan(standby.promote)
        for name, (operate, wanted) in OPERATIONS.items():
            operate(studies[name])
            assert studies[name].statuses() == wanted, name
        assert waits


def wait_for_replication(primary, standby):
    with psycopg.connect(primary.url) as connection:
        position = connection.execute("SELECT pg_current_wal_lsn()").fetchone()[0]
    with psycopg.connect(standby.url, autocommit=True) as connection:
        replayed = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
        while not connection.execute(replayed, [position]).fetchone()[0]:
            time.sleep(0.1)
