"""The training loop on the bundled digits: it learns, stops, records, and goes on where it was."""

import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from comet_moe.config import load_train_config
from comet_moe.data import load
from comet_moe.exceptions import RunError
from comet_moe.training.evaluate import accuracy, auc
from comet_moe.training.run import RunFolder
from comet_moe.training.trainer import Trainer

SMALL = ["data.options.train_size=400", "data.options.validation_size=200", "data.options.test_size=200"]


def config(*settings):
    return load_train_config("multidigits", [*SMALL, "training.epochs=3", "training.threads=1", *settings])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    options = config().data.options
    return load("multidigits", cache=tmp_path_factory.mktemp("cache"), **options)


def started(path, run):
    folder = RunFolder(path)
    folder.start(run)
    return folder


def deterministic(result):
    return {name: value for name, value in result.items() if name != "seconds"}


def test_a_run_leaves_a_complete_folder(tmp_path, dataset):
    run = config("gate=comet+")
    folder = started(tmp_path / "run", run)
    result = Trainer(run, dataset, folder).run()
    assert folder.config() == run
    assert folder.result() == json.loads(json.dumps(result))
    assert [record["epoch"] for record in folder.metrics()] == [1, 2, 3]
    assert {"train_loss", "validation_loss", "tau", "permutations", "samples_per_second"} <= folder.metrics()[
        0
    ].keys()
    assert result["status"] == "complete"
    assert result["validation_loss"] == min(record["validation_loss"] for record in folder.metrics())


def test_the_same_seed_gives_the_same_result_and_another_another(tmp_path, dataset):
    def trained(name, *settings):
        run = config(*settings)
        return deterministic(Trainer(run, dataset, started(tmp_path / name, run)).run())

    assert trained("a") == trained("b")
    assert trained("c", "seed=1")["test_loss"] != trained("d")["test_loss"]


@pytest.mark.parametrize("gate", ["comet+", "topk"])
def test_a_run_that_was_stopped_goes_on_to_the_same_result(tmp_path, dataset, gate):
    run = config(f"gate={gate}", "search.epochs=2")
    whole = Trainer(run, dataset, started(tmp_path / "whole", run)).run()

    class Killed(Exception):
        pass

    folder = started(tmp_path / "stopped", run)
    for epoch, step in ((1, 2), (2, 3), (3, 1)):  # each time a little further, from the last checkpoint

        def stop(progress, epoch=epoch, step=step):
            if (progress.epoch, progress.done) == (epoch, step):
                raise Killed

        with pytest.raises(Killed):
            Trainer(run, dataset, folder, on_batch=stop).run()
    resumed = Trainer(run, dataset, folder).run()
    assert deterministic(resumed) == deterministic(whole)
    assert len(folder.metrics()) == 3
    weights = RunFolder(tmp_path / "whole").model()
    assert all(torch.equal(value, weights[name]) for name, value in folder.model().items())


def test_early_stopping_counts_from_the_best_epoch(tmp_path, dataset):
    run = config("training.epochs=30", "training.patience=1", "training.learning_rate=0.05")
    result = Trainer(run, dataset, started(tmp_path / "run", run)).run()
    assert result["epochs"] == result["best_epoch"] + 1 < 30


def test_a_diverging_run_ends_with_a_reason(tmp_path, dataset):
    run = config("training.learning_rate=1e30")
    folder = started(tmp_path / "run", run)
    result = Trainer(run, dataset, folder).run()
    assert result["status"] == "failed"
    assert "loss is" in result["reason"]
    assert folder.state() == "finished"


def test_a_damaged_checkpoint_is_named(tmp_path, dataset):
    run = config("training.epochs=1")
    folder = started(tmp_path / "run", run)
    Trainer(run, dataset, folder).run()
    data = folder.checkpoint_file.read_bytes()
    folder.checkpoint_file.write_bytes(data[: len(data) // 2])
    with pytest.raises(RunError, match=r"state\.safetensors cannot be read .* delete it"):
        folder.checkpoint()


def test_auc_is_scikit_learns_ties_included():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 20, 500).astype(float), rng.integers(0, 2, 500)
    assert math.isclose(auc(scores, labels), roc_auc_score(labels, scores), rel_tol=1e-12)
    assert math.isnan(auc(scores, np.ones(500)))


def test_accuracy_of_logits():
    assert accuracy(np.array([-1.0, 2.0, 3.0]), np.array([0, 1, 0])) == 2 / 3
    assert accuracy(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0, 0])) == 0.5
