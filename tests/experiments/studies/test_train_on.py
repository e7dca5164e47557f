"""A trial that ran out of time is trained on from its checkpoint, up to convergence."""

import json
import time
from dataclasses import replace
from multiprocessing import Pipe

import pytest

from comet_moe.experiments.studies.definition import StudyOptions
from comet_moe.experiments.studies.study import open_study
from comet_moe.experiments.studies.worker import _Worker
from comet_moe.experiments.training.run import RunFolder
from made_tables import customers, write_table


def run_worker(study, **limits):
    """Work in this process until nothing is left to do."""
    reader, writer = Pipe(duplex=False)
    _Worker(replace(study.worker_config(1), **limits), writer).run()
    study.refresh()
    return [message[0] for message in iter(lambda: reader.recv() if reader.poll() else None, None)]


@pytest.mark.slow
def test_a_trial_that_ran_out_of_time_resumes_where_it_stopped(tmp_path, monkeypatch):
    table = write_table(customers(300), tmp_path / "people.parquet")
    settings = [f"data.path={table}", "data.options.targets=[bought]", "training.batch_size=64"]
    settings += ["training.patience=3", "training.epochs=40"]
    options = StudyOptions(
        kind="ablation",
        recipe="table",
        out=tmp_path / "study",
        gates=["dense", "topk"],
        trials=1,
        settings=settings,
    )
    study = open_study(options)
    assert run_worker(study, deadline=0.0) == []  # the deadline has passed: no trial is started
    assert [trial.status for trial in study.trials] == ["waiting", "waiting"]

    jumped = time.time() + 1e6
    monkeypatch.setattr(time, "time", lambda: jumped)  # the clock of the machine is set
    run_worker(study, max_seconds=0.0, deadline=time.monotonic() + 1e4)
    assert [(trial.status, trial.converged, trial.epochs) for trial in study.trials] == [
        ("complete", False, 1)
    ] * 2
    assert all(trial.test_rows["bought"] and not trial.loss_resamples for trial in study.trials)
    assert not any(trained.converged for trained in study.summarise(["dense", "topk"]).values())
    folder = RunFolder(study.folder.run_path("dense", 0))
    (first,) = folder.metrics()

    # In another process, as after `--resume`; the other network waits.
    study = open_study(replace(options, gates=None, trials=None, resume=True))
    assert study.train_on(["dense"]) == 1
    assert [trial.status for trial in study.trials] == ["waiting", "complete"]
    assert folder.state() == "started"
    run_worker(study)
    assert [trial.converged for trial in study.trials] == [True, False]
    assert [len(trial.loss_resamples) for trial in study.trials] == [200, 0]
    metrics = folder.metrics()
    assert metrics[0] == first
    assert [record.epoch for record in metrics] == list(range(1, len(metrics) + 1))
    assert len(metrics) > 3
    assert not folder.checkpoint_file.exists()
    assert json.loads(folder.result_file.read_text())["converged"] is True
    assert study.train_on(["dense"]) == 0  # it has converged
