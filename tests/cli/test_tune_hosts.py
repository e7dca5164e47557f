"""A study on two hosts with one PostgreSQL: a host that is cut off loses nothing and counts nothing twice.

The hosts are network namespaces, and a cable between them is pulled. Where a machine allows none, the tests
of two commands on one host, in ``test_tune.py``, remain.
"""

import json
import subprocess
import sys

import pytest
from test_tune import arguments, interrupted_run, results, trials, wait_for

from hosts import DATABASE

TRIALS = 3


def start_on(hosts, name, out):
    options = ("--gates", "topk", "--trials", TRIALS, "--workers", 1, "--heartbeat", 1, "--json")
    settings = ["training.epochs=20", "training.patience=20"]  # so long that one is cut off in the middle
    words = arguments("tune", out, *options, "--storage", DATABASE, settings=settings)
    command = [*hosts.command(name), sys.executable, "-m", "comet_moe", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def attempts(socket_folder):
    """(state, number of attempts) in the database, and how many trials have a complete one."""
    import psycopg

    url = f"postgresql://postgres@/postgres?host={socket_folder}"
    with psycopg.connect(url) as connection:
        states = connection.execute("SELECT state, count(*) FROM trials GROUP BY state").fetchall()
        index = "SELECT DISTINCT value_json FROM trial_user_attributes JOIN trials USING (trial_id)"
        complete = connection.execute(f"{index} WHERE key = 'index' AND state = 'COMPLETE'").fetchall()
    return dict(states), len(complete)


@pytest.mark.slow
def test_a_host_that_is_cut_off_loses_nothing_and_counts_nothing_twice(two_hosts, tmp_path):
    hosts, server = two_hosts
    outs = {name: tmp_path / name / "study" for name in ("one", "two")}
    processes = {name: start_on(hosts, name, out) for name, out in outs.items()}
    name = wait_for(lambda: interrupted_run(outs["two"]), processes["two"])
    hosts.cut("two")
    elsewhere = outs["one"] / "runs" / name
    wait_for(elsewhere.exists, processes["one"])
    assert processes["two"].poll() is None  # an outage of some seconds does not end the command
    assert not (outs["two"] / "runs" / name / "result.json").exists()
    hosts.connect("two")
    for name_of_host, process in processes.items():
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, (name_of_host, err)
        (row,) = json.loads(out)["rows"]
        assert (row["trials_complete"], row["trials_failed"]) == (TRIALS, 0)
    assert results(outs["one"]) == results(outs["two"])
    by_run = {row["run"]: row["attempts"] for row in trials(outs["one"])}
    assert by_run.pop(f"runs/{name}") == 2
    assert set(by_run.values()) == {1}
    assert attempts(server) == ({"COMPLETE": TRIALS, "FAIL": 1}, TRIALS)
