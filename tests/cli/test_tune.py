"""``comet-moe tune`` and ``ablate``: the folder that they write, and that killed workers lose nothing."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from command import comet_moe, refusal, start_python, succeed

from comet_moe.experiments.studies.definition import StudyOptions
from comet_moe.experiments.studies.study import open_study
from comet_moe.experiments.training.records import ResultRecord
from storages import NEEDS_POSTGRES

SMALL = [
    *("data.options.train_size=400", "data.options.validation_size=200", "data.options.test_size=200"),
    *("training.epochs=4", "training.batch_size=32", "training.threads=1"),
]


def arguments(verb, out, *more, settings=()):
    sets = [part for setting in (*SMALL, *settings) for part in ("--set", setting)]
    return [verb, "multidigits", *sets, "--out", str(out), *map(str, more)]


def start(*words, before=()):
    """Start the command in a process group of its own, as a terminal would."""
    return start_python("-m", "comet_moe", *words, before=before, start_new_session=True, env=None)


def trials(out):
    return [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]


def results(out):
    """The trials of a study without what depends on the workers."""
    changing = ("seconds", "worker", "attempts")
    return [{name: value for name, value in row.items() if name not in changing} for row in trials(out)]


def wait_for(condition, has_ended):
    """The value of ``condition`` once it is true, unless the study ends before; a test has a limit itself."""
    while not (value := condition()):
        assert not has_ended()
        time.sleep(0.01)
    return value


def ended(process):
    """For `wait_for`: whether ``process`` has ended."""
    return lambda: process.poll() is not None


def succeed_beside(act, *words):
    """Run the command in this process, and ``act(has_ended)`` beside it; what the command says."""
    end = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        acting = threads.submit(act, end.is_set)
        try:
            done = succeed(*words)
        finally:
            end.set()
        acting.result()
    return done


def interrupted_run(out):
    """The name of a run that has a checkpoint and no result, if there is one."""
    runs = [path.parents[1] for path in out.glob("runs/*/checkpoint/state.safetensors")]
    return next((run.name for run in runs if not (run / "result.json").exists()), None)


def end_workers(out, number, has_ended, is_meant=bool):
    """Send signal ``number`` to the workers of a study in this process, in a trial that has a checkpoint.

    ``is_meant`` tells by its name whether a trial will do. Returns this name.
    """
    while True:
        wait_for(lambda: is_meant(interrupted_run(out)), has_ended)
        pids = [process.pid for process in multiprocessing.active_children()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        name = interrupted_run(out)  # on a busy machine the trial may have ended since
        for pid in pids:
            if is_meant(name):
                os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)
        if is_meant(name):
            return name


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A study with one worker that ran without interruption."""
    out = tmp_path_factory.mktemp("uninterrupted") / "study"
    words = arguments("tune", out, "--gates", "topk,comet+", "--trials", 2, "--workers", 1, "--json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMET_MOE_CACHE", str(out.parent / "cache"))
        return out, succeed(*words).json


@pytest.mark.slow
def test_a_study_folder_has_runs_and_a_table_of_trials(uninterrupted):
    out, summary = uninterrupted
    rows = trials(out)
    assert [(row["gate"], row["index"], row["status"]) for row in rows] == [
        (gate, index, "complete") for gate in ("topk", "comet+") for index in range(2)
    ]
    for row in rows:
        result = json.loads((out / row["run"] / "result.json").read_text())
        assert all(row[name] == result[name] for name in ("validation_loss", "test_loss", "tasks", "seconds"))
        config = yaml.safe_load((out / row["run"] / "config.yaml").read_text())
        assert config["training"]["learning_rate"] == row["params"]["training.learning_rate"]
        assert config["seed"] == row["params"]["seed"] == row["index"]
        assert not (out / row["run"] / "checkpoint").exists()
    for gate in ("topk", "comet+"):
        of_gate = [row for row in rows if row["gate"] == gate]
        best = min(of_gate, key=lambda row: row["validation_loss"])
        kept = [row["run"] for row in of_gate if (out / row["run"] / "model.safetensors").exists()]
        assert kept == [best["run"]]
        row = next(row for row in summary["rows"] if row["gate"] == gate)
        assert row["best_run"] == best["run"]
        assert row["trials_complete"] == 2
    study = json.loads((out / "study.json").read_text())
    assert study["kind"] == "tuning"
    assert study["gates"] == ["topk", "comet+"]
    assert study["experts"] == 8
    assert study["space"]["topk"] == {"training.learning_rate": {"log": [5e-4, 1e-2]}}


@pytest.mark.slow
def test_table_curves_and_report_need_only_study_json_and_trials_jsonl(uninterrupted, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("study.json", "trials.jsonl"):
        (copy / name).write_text((uninterrupted[0] / name).read_text())
    rows = succeed("table", copy, "--top", 100, "--json").json["rows"]
    for row in rows:
        losses = [trial["test_loss"] for trial in trials(copy) if trial["gate"] == row["gate"]]
        assert row["trials_complete"] == 2
        assert row["test_loss_mean"] == pytest.approx(sum(losses) / 2, rel=1e-12)
    assert {row["gate"] for row in succeed("curves", copy, "--json").json["rows"]} == {"topk", "comet+"}
    succeed("report", copy, "-o", tmp_path / "page.html")
    assert f"{rows[0]['test_loss_mean']:.2f}" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_a_killed_worker_loses_nothing(uninterrupted, tmp_path):
    out = tmp_path / "study"
    names = []
    succeed_beside(
        lambda has_ended: names.append(end_workers(out, signal.SIGKILL, has_ended)),
        *arguments("tune", out, "--gates", "topk,comet+", "--trials", 2, "--workers", 2),
    )
    (name,) = names
    assert results(out) == results(uninterrupted[0])
    attempts = {row["run"]: row["attempts"] for row in trials(out)}
    assert attempts[f"runs/{name}"] == 2
    environment = json.loads((out / "runs" / name / "environment.json").read_text())
    assert environment[-1]["from_epoch"] > 0  # from its checkpoint, not from the start


@pytest.mark.slow
def test_a_study_resumes_after_all_its_processes_were_killed(uninterrupted, tmp_path, storage_url):
    out = tmp_path / "study"
    words = [
        *arguments("tune", out, "--gates", "topk,comet+", "--trials", 2, "--workers", 2),
        *("--storage", storage_url, "--heartbeat", "1", "--json"),
    ]
    process = start(*words)
    wait_for(lambda: interrupted_run(out), ended(process))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    resumed = succeed(*words, "--resume").json
    assert results(out) == results(uninterrupted[0])
    assert [row["trials_complete"] for row in resumed["rows"]] == [2, 2]
    assert succeed(*words, "--resume").json == resumed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_group", "code"),
    [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143), (signal.SIGTERM, True, 143)],
)
def test_ctrl_c_and_sigterm_release_the_trials_and_print_the_command_to_resume(
    uninterrupted, tmp_path, number, to_group, code
):
    out = tmp_path / "study"
    words = arguments("tune", out, "--gates", "topk,comet+", "--trials", 2, "--workers", 1)
    process = start(*words)
    wait_for(lambda: interrupted_run(out), ended(process))
    (os.killpg if to_group else os.kill)(process.pid, number)
    _, err = process.communicate()
    assert process.returncode == code
    assert not [row for row in trials(out) if row["status"] == "running"]
    assert f"comet-moe tune multidigits --out {out} --resume`" in err
    assert "Traceback" not in err
    if number == signal.SIGINT:
        succeed(*words, "--resume")  # at once: no heartbeat has to be missed
        assert results(out) == results(uninterrupted[0])


@pytest.mark.slow
def test_a_terminated_worker_is_replaced(uninterrupted, tmp_path):
    out = tmp_path / "study"
    succeed_beside(
        lambda has_ended: end_workers(out, signal.SIGTERM, has_ended),
        *arguments("tune", out, "--gates", "topk,comet+", "--trials", 2, "--workers", 1),
    )
    assert results(out) == results(uninterrupted[0])


@pytest.mark.slow
def test_two_machines_share_one_study(uninterrupted, tmp_path, storage_url):
    outs = [tmp_path / name / "study" for name in ("one", "two")]
    one, two = (
        [
            *arguments("tune", out, "--gates", "topk,comet+", "--trials", 2, "--workers", 1),
            *("--storage", storage_url),
        ]
        for out in outs
    )
    process = start(*one)
    # The second begins while the first has trials left.
    wait_for(lambda: interrupted_run(outs[0]), ended(process))
    succeed(*two)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert results(outs[0]) == results(outs[1]) == results(uninterrupted[0])
    assert {row["attempts"] for row in trials(outs[0])} == {1}
    here = [{path.name for path in out.glob("runs/*")} for out in outs]
    assert not here[0] & here[1]
    assert len(here[0] | here[1]) == 4


@pytest.mark.slow
def test_trials_can_be_added(tmp_path):
    out = tmp_path / "study"
    fast = ["training.epochs=1"]
    succeed(*arguments("tune", out, "--gates", "topk", "--trials", 1, "--workers", 1, settings=fast))
    succeed(*arguments("tune", out, "--add-trials", 1, "--workers", 1, settings=fast))
    assert [(row["index"], row["status"], row["attempts"]) for row in trials(out)] == [
        (0, "complete", 1),
        (1, "complete", 1),
    ]
    assert json.loads((out / "study.json").read_text())["trials"] == 2


@pytest.mark.slow
def test_gates_can_be_added(tmp_path):
    out = tmp_path / "study"
    fast = ["training.epochs=1"]
    succeed(*arguments("ablate", out, "--gates", "topk", "--seeds", 1, "--workers", 1, settings=fast))
    before = trials(out)
    succeed(*arguments("ablate", out, "--add-gates", "dense,comet", "--workers", 1, settings=fast))
    assert trials(out)[:1] == before
    assert [(row["gate"], row["status"]) for row in trials(out)] == [
        (gate, "complete") for gate in ("topk", "dense", "comet")
    ]


@pytest.mark.slow
def test_some_gates_of_a_study_can_be_trained_first(tmp_path):
    out = tmp_path / "study"

    def ablate(*more):
        succeed(*arguments("ablate", out, "--workers", 1, *more, settings=["training.epochs=1"]))
        return [(row["gate"], row["status"], row["attempts"]) for row in trials(out)]

    rows = ablate("--gates", "topk,dense", "--seeds", 1, "--only-gates", "dense")
    assert rows == [("topk", "waiting", 0), ("dense", "complete", 1)]
    assert ablate("--add-gates", "softmax", "--only-gates", "softmax") == [*rows, ("softmax", "complete", 1)]
    assert ablate("--resume") == [(gate, "complete", 1) for gate in ("topk", "dense", "softmax")]


@pytest.mark.slow
def test_a_copy_of_study_json_and_trials_jsonl_is_resumed_without_training_again(uninterrupted, tmp_path):
    copy = tmp_path / "study"
    copy.mkdir()
    for name in ("study.json", "trials.jsonl"):
        (copy / name).write_text((uninterrupted[0] / name).read_text())
    succeed(*arguments("tune", copy, "--add-trials", 1, "--workers", 1))
    assert [row for row in trials(copy) if row["index"] < 2] == trials(uninterrupted[0])
    assert [(row["index"], row["status"]) for row in trials(copy)] == [(i, "complete") for i in (0, 1, 2)] * 2
    assert sorted(path.name for path in (copy / "runs").iterdir()) == ["comet+-002", "topk-002"]


@pytest.mark.slow
def test_the_path_of_the_data_may_differ_between_machines(tmp_path):
    storage_url = f"sqlite:///{tmp_path / 'trials.sqlite'}"
    table = "user,item,rating\n" + "".join(f"u{i % 17},i{i % 23},{1 + i % 5}\n" for i in range(300))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "table.csv").write_text(table)
    for name, more in (("one", ["--trials", "1"]), ("two", ["--add-trials", "1"])):
        out = tmp_path / name / "study"
        words = [
            "tune",
            "ratings",
            "--gates",
            "hash",
            "--workers",
            "1",
            "--storage",
            storage_url,
            "--out",
            out,
        ]
        words += ["--set", "training.epochs=1", "--set", f"data.path={tmp_path / name / 'table.csv'}"]
        if name == "two":
            succeed(*words)
        succeed(*words, *more)
        settings = json.loads((out / "study.json").read_text())["settings"]
        assert settings == ["training.epochs=1", f"data.path={tmp_path / name / 'table.csv'}"]
    config = yaml.safe_load((tmp_path / "two" / "study" / "runs" / "hash-001" / "config.yaml").read_text())
    assert config["data"]["path"] == str(tmp_path / "two" / "table.csv")
    assert [row["status"] for row in trials(tmp_path / "two" / "study")] == ["complete"] * 2


@pytest.mark.slow
def test_a_diverged_trial_is_stored_with_its_reason(tmp_path):
    out = tmp_path / "study"
    done = succeed(
        *arguments("tune", out, "--gates", "topk", "--trials", 1, "--workers", 1, "--json"),
        *("--set", "training.learning_rate=1e38"),
    )
    assert done.json["rows"][0] | {"gate": "topk", "trials_failed": 1} == done.json["rows"][0]
    (row,) = trials(out)
    assert row["status"] == "failed"
    assert "loss is" in row["reason"]
    assert row["attempts"] == 1


@pytest.mark.slow
def test_a_trial_whose_values_do_not_fit_together_fails_and_the_others_are_run(tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        "data: {name: multidigits}\n"
        "model: {kind: image, experts: 4, filters: [4], kernel_size: 3}\n"
        "gate: topk\n"
        "gates: {topk: {k: 2}}\n"
        "training: {learning_rate: 0.001}\n"
        "tuning: {search: {search.shared: {choice: [tree, all]}}}\n"
    )
    words = arguments("tune", tmp_path / "study", "--gates", "topk+", "--trials", 4, "--workers", 1)
    succeed(words[0], recipe, *words[2:], "--set", "training.epochs=1")
    rows = trials(tmp_path / "study")
    assert {row["params"]["search.shared"] for row in rows} == {"tree", "all"}
    for row in rows:
        if row["params"]["search.shared"] == "all":
            assert row["status"] == "complete"
        else:
            assert row["status"] == "failed"
            assert row["reason"].startswith("recipe own: search.shared is tree, but the gate topk+ has no")


def test_an_ablation_joins_the_study_in_the_storage_with_its_gates(tmp_path, storage_url):
    words = ["--storage", storage_url, "--name", "shared", "--json"]
    options = StudyOptions(
        "ablation",
        "multidigits",
        tmp_path / "one",
        ["topk"],
        1,
        settings=SMALL,
        storage=storage_url,
        name="shared",
    )
    study = open_study(options)
    queue = study.queue
    queue.finish(queue.claim(study.definition), ResultRecord(status="failed", reason="for this test"))
    joined = succeed("ablate", "multidigits", "--out", tmp_path / "two", *words).json
    assert [(row["gate"], row["trials_failed"]) for row in joined["rows"]] == [("topk", 1)]


@pytest.mark.slow
def test_an_ablation_trains_each_gate_from_several_seeds(tmp_path):
    out = tmp_path / "study"
    words = arguments("ablate", out, "--gates", "topk,topk+", "--seeds", 2, settings=["training.epochs=2"])
    done = succeed(*words, "--workers", 2, "--json")
    assert [row["trials_complete"] for row in done.json["rows"]] == [2, 2]
    configs = [yaml.safe_load((out / row["run"] / "config.yaml").read_text()) for row in trials(out)]
    assert [config.pop("seed") for config in configs] == [0, 1, 0, 1]
    assert configs[0] == configs[1]
    assert configs[2] == configs[3]
    assert [row["params"] for row in trials(out)] == [{"seed": 0}, {"seed": 1}] * 2


def test_wrong_input_leaves_no_files_behind(tmp_path):
    out = tmp_path / "study"
    assert "got 'resnet'" in refusal("tune", "multidigits", "--gates", "resnet", "--out", out)
    assert "there is no recipe" in refusal("tune", "multidigit", "--gates", "topk", "--out", out)
    assert "storage must be" in refusal(
        *("tune", "multidigits", "--gates", "topk", "--out", out, "--storage", "mysql://host/db")
    )
    assert "has no study to add to" in refusal(
        *("tune", "multidigits", "--gates", "topk", "--out", out, "--add-trials", 3)
    )
    assert "a hash gate needs keys" in refusal("tune", "multidigits", "--gates", "topk,hash", "--out", out)
    assert not out.exists()
    assert comet_moe("tune", "multidigits", "--gates", "topk", "--trials", "0").code == 2
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert "has files but no study" in refusal("tune", "multidigits", "--gates", "topk", "--out", out)


@pytest.mark.slow
def test_resuming_needs_the_option_and_the_same_arguments(uninterrupted):
    out = uninterrupted[0]
    before = (out / "trials.jsonl").read_text()
    assert "has a study already: resume it with --resume" in refusal(
        *("tune", "multidigits", "--gates", "topk", "--out", out)
    )
    assert "trials is 2 in the saved study, got 3" in refusal(
        *("tune", "multidigits", "--trials", 3, "--out", out, "--resume")
    )
    assert "training.epochs is 4 in the saved study, got 5" in refusal(
        *("tune", "multidigits", "--out", out, "--resume", "--set", "training.epochs=5")
    )
    assert "there is no setting teacher" in refusal(
        *("tune", "multidigits", "--out", out, "--resume", "--set", "teacher=x")
    )
    assert "kind is 'tuning' in the saved study, got 'ablation'" in refusal(
        *("ablate", "multidigits", "--out", out, "--resume")
    )
    assert "is named 'study', got --name 'other'" in refusal(
        *("tune", "multidigits", "--out", out, "--resume", "--name", "other")
    )
    assert "has another storage" in refusal(
        *(
            "tune",
            "multidigits",
            "--out",
            out,
            "--resume",
            "--storage",
            f"sqlite:///{out.parent}/other.sqlite",
        )
    )
    assert (out / "trials.jsonl").read_text() == before


@pytest.mark.slow
def test_a_missing_optuna_is_named_with_its_extra(tmp_path):
    code = "import sys; sys.modules['optuna'] = None; from comet_moe.cli import main; main()"
    words = ("tune", "multidigits", "--gates", "topk", "--out", str(tmp_path / "study"))
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "comet-moe: tuning needs optuna, which is not installed: pip install 'comet-moe[tune]'"
    ]
    assert not (tmp_path / "study").exists()


def refuse_connections(url):
    """End all connections to the database of ``url`` and take no more, as ``pg_ctl stop -m fast`` does."""
    import psycopg

    server, _, name = url.rpartition("/")
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
        )


def allow_connections(url):
    import psycopg

    server, _, name = url.rpartition("/")
    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


@pytest.mark.slow
@NEEDS_POSTGRES
def test_a_study_survives_a_restart_of_its_storage(uninterrupted, tmp_path, postgres_url):
    out = tmp_path / "study"
    process = start(
        *arguments("tune", out, "--gates", "topk,comet+", "--trials", 2, "--workers", 1),
        *("--storage", postgres_url, "--heartbeat", "1", "--json"),
    )
    wait_for(lambda: interrupted_run(out), ended(process))
    refuse_connections(postgres_url)
    time.sleep(2.0)  # in which the processes meet the closed storage, by their heartbeats at the latest
    allow_connections(postgres_url)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert results(out) == results(uninterrupted[0])
