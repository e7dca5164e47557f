"""A study on two hosts with one PostgreSQL: a host that is cut off loses nothing and counts nothing twice.

The hosts are network namespaces, and a cable between them is pulled. Where a machine allows none, the tests
of two commands on one host, in ``test_tune.py``, remain.
"""

import json
import os
import signal
from contextlib import ExitStack, suppress

import pytest
from test_tune import arguments, ended, interrupted_run, results, start, trials, wait_for

from hosts import DATABASE

TRIALS = 3


def start_on(hosts, name, out, stack):
    options = ("--gates", "topk", "--trials", TRIALS, "--workers", 1, "--heartbeat", 1, "--json")
    settings = ["training.epochs=12", "training.patience=12"]  # so long that one is cut off in the middle
    words = arguments("tune", out, *options, "--storage", DATABASE, settings=settings)
    process = start(*words, before=hosts.command(name))
    stack.callback(kill_group, process)
    return process


def kill_group(process):
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def complete_attempts(socket_folder):
    """Attempts, of all trials, that count as complete in the database."""
    import psycopg

    with psycopg.connect(f"postgresql://postgres@/postgres?host={socket_folder}") as connection:
        count = "SELECT count(*) FROM trials WHERE state = 'COMPLETE'"
        return connection.execute(count).fetchone()[0]


@pytest.mark.slow
def test_a_host_that_is_cut_off_loses_nothing_and_counts_nothing_twice(two_hosts, tmp_path):
    hosts, server = two_hosts
    outs = {name: tmp_path / name / "study" for name in ("one", "two")}
    with ExitStack() as stack:
        two = start_on(hosts, "two", outs["two"], stack)
        run = wait_for(lambda: interrupted_run(outs["two"]), ended(two))
        hosts.cut("two")
        one = start_on(hosts, "one", outs["one"], stack)
        wait_for((outs["one"] / "runs" / run).exists, ended(one))
        assert two.poll() is None  # it waits for the network
        assert not (outs["two"] / "runs" / run / "result.json").exists()
        hosts.connect("two")
        for process in (one, two):
            out, err = process.communicate()
            assert process.returncode == 0, err
            (row,) = json.loads(out)["rows"]
            assert (row["trials_complete"], row["trials_failed"]) == (TRIALS, 0)
    assert results(outs["one"]) == results(outs["two"])
    (cut_off,) = [row for row in trials(outs["one"]) if row["run"] == f"runs/{run}"]
    assert cut_off["attempts"] >= 2
    assert complete_attempts(server) == TRIALS
