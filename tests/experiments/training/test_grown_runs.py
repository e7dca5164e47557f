"""Runs whose network grows: ``training.grow_at``."""

import pytest
import torch

from comet_moe.exceptions import RecipeError
from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.data import load
from comet_moe.experiments.models.build import build_model
from comet_moe.experiments.training.growing import GrowingMixture
from comet_moe.experiments.training.recipe import build_trainer, load_run
from comet_moe.experiments.training.run import RunFolder, start_run
from comet_moe.experiments.training.trainer import Callbacks
from comet_moe.gates import RescaledGate
from comet_moe.optimization import parameter_groups

SMALL = ["data.options.train_size=300", "data.options.validation_size=100", "data.options.test_size=100"]


def config(*settings):
    given = ["gate=comet", "training.epochs=4", "training.threads=1", "training.grow_at=0.5", *settings]
    return load_train_config("multidigits", [*SMALL, *given])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return load("multidigits", cache=tmp_path_factory.mktemp("cache"), **config().data.options)


def train(path, run, dataset, **callbacks):
    folder = RunFolder(path)
    trainer = build_trainer(run, dataset, folder, callbacks=Callbacks(**callbacks))
    start_run(folder, run, dataset)
    return trainer, trainer.run()


@pytest.mark.parametrize("gate", ["comet", "topk", "switch", "dselect", "comet+"])
@pytest.mark.parametrize("recipe", ["multidigits", "movielens"])
def test_growing_does_not_change_the_output(recipe, gate, dataset):
    sizes = {"name": "movielens", "num_users": 9, "num_items": 8, "rows": {"train": 64}}
    meta = dataset.meta if recipe == "multidigits" else sizes
    settings = ["training.grow_at=0.5", f"gate={gate}", "training.epochs=4", "model.experts=5"]
    model = build_model(load_train_config(recipe, settings), meta).eval()
    growing = GrowingMixture(model)
    optimizer = torch.optim.Adam(parameter_groups(model, 0.01))
    features = model.example_features(6)
    dense, _ = model(features)
    growing.grow(optimizer, None)
    with torch.no_grad():
        outputs, routings = model(features)
    for before, after in zip(dense, outputs, strict=True):
        torch.testing.assert_close(after, before.detach(), atol=1e-5, rtol=1e-5)  # float32 weights sum to 1
    assert routings[0].num_experts == 5
    if gate == "switch":
        assert all(isinstance(own, RescaledGate) for own in model.moe.gates)


def test_a_run_grows_and_its_folder_has_the_grown_network(tmp_path, dataset):
    run = config("training.patience=1")
    _, result = train(tmp_path / "run", run, dataset)
    records = RunFolder(tmp_path / "run").metrics()
    experts = [next(iter(record.validation.routing.values())).share_of_samples for record in records]
    assert [len(load) for load in experts] == [1, 1, run.model.experts, run.model.experts][: len(records)]
    assert len(records) > 2  # patience does not end the dense epochs
    assert result.best_epoch > 2
    loaded = load_run(tmp_path / "run")
    assert loaded.model.moe.experts.num_experts == run.model.experts
    assert result.parameters == sum(parameter.numel() for parameter in loaded.model.parameters())


@pytest.mark.parametrize("stop_after", [1, 2, 3], ids=["before", "at", "after"])
def test_a_run_that_was_killed_resumes_with_the_same_result(tmp_path, dataset, stop_after):
    run = config("training.gate_lr_factor=3", "training.schedule=cosine")
    _, whole = train(tmp_path / "whole", run, dataset)

    def stop(record):
        if record.epoch == stop_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", run, dataset, on_epoch=stop)
    resumed = build_trainer(run, dataset, RunFolder(tmp_path / "killed")).run()
    assert resumed.model_copy(update={"seconds": 0}) == whole.model_copy(update={"seconds": 0})
    weights = [RunFolder(tmp_path / name).model() for name in ("whole", "killed")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_gates_have_their_own_rate_along_the_schedule(tmp_path, dataset):
    run = config("training.gate_lr_factor=3", "training.schedule=cosine")
    trainer, _ = train(tmp_path / "run", run, dataset)
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert trainer.learning_rates == pytest.approx([run.training.learning_rate * f for f in (1, 3)])
    assert rates[1] == pytest.approx(3 * rates[0])


def test_a_network_without_a_gate_has_nothing_to_grow():
    assert config("gate=dense").dense_epochs == 0
    assert config("training.epochs=2", "training.grow_at=0.1").dense_epochs == 1
    assert config("training.epochs=2", "training.grow_at=0.9").dense_epochs == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["training.grow_at=1"], "grow_at"),
        (["training.sparse_embeddings=true"], "cannot be combined with training.sparse_embeddings"),
        (["training.epochs=1"], "at least 2 epochs"),
        (["parallel.experts=2"], "parallel.experts is 2"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        config(*settings)
