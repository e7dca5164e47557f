"""Training in bfloat16: float32 parameters and losses, and results that seeds change more than precision."""

import statistics

import pytest
import torch

from comet_moe.exceptions import DeviceError
from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.data import load
from comet_moe.experiments.models.build import build_model
from comet_moe.experiments.training.batches import take_rows
from comet_moe.experiments.training.distributed import Processes
from comet_moe.experiments.training.recipe import MultiTaskObjective, build_trainer, evaluate_run, load_run
from comet_moe.experiments.training.run import RunFolder, start_run, with_machine

SMALL = ["data.options.train_size=200", "data.options.validation_size=100", "data.options.test_size=300"]


def config(*settings):
    fixed = ["training.epochs=2", "training.threads=1", "training.learning_rate=3e-3"]
    return load_train_config("multidigits", [*SMALL, *fixed, *settings])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return load("multidigits", cache=tmp_path_factory.mktemp("cache"), **config().data.options)


def train(path, run, dataset):
    folder = RunFolder(path)
    trainer = build_trainer(run, dataset, folder)
    start_run(folder, run, dataset)
    return trainer.run()


@pytest.mark.slow
def test_a_seed_changes_the_test_loss_more_than_bfloat16_does(tmp_path, dataset):
    losses = {
        precision: [
            train(
                tmp_path / f"{precision}{seed}",
                config("gate=comet", f"seed={seed}", f"training.precision={precision}"),
                dataset,
            ).test_loss
            for seed in range(3)
        ]
        for precision in ("float32", "bfloat16")
    }
    spread = statistics.stdev(losses["float32"])
    difference = abs(statistics.mean(losses["bfloat16"]) - statistics.mean(losses["float32"]))
    assert losses["bfloat16"] != losses["float32"]
    assert difference < spread


def test_parameters_losses_and_optimiser_state_stay_in_float32(tmp_path, dataset):
    run = config("gate=comet+", "training.precision=bfloat16", "training.epochs=1")
    trainer = build_trainer(run, dataset, RunFolder(tmp_path / "run"))
    with trainer.placement.autocast():
        losses = trainer.objective(take_rows(dataset.train, slice(0, 20)))
    losses.total.backward()
    trainer.optimizer.step()
    assert {losses.total.dtype, losses.aux_loss.dtype} == {torch.float32}
    assert {value.dtype for value in trainer.model.parameters()} == {torch.float32}
    assert {value.grad.dtype for value in trainer.model.parameters()} == {torch.float32}
    state = [value for entry in trainer.optimizer.state.values() for value in entry.values()]
    assert {value.dtype for value in state} == {torch.float32}
    assert {routing.weights.dtype for routing in losses.routings.values()} == {torch.float32}


def test_the_products_of_experts_and_heads_are_in_bfloat16(dataset):
    model = build_model(config("gate=topk"), dataset.meta)
    seen = []
    for head in model.heads:
        head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].dtype))
        head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        MultiTaskObjective(model, Processes())(take_rows(dataset.train, slice(0, 20)))
    assert set(seen) == {torch.bfloat16}


def test_a_run_is_evaluated_in_its_own_precision_or_in_another(tmp_path, dataset, monkeypatch):
    monkeypatch.setattr("comet_moe.experiments.training.recipe.load_dataset", lambda config: dataset)
    run = with_machine(config("gate=topk", "training.precision=bfloat16"))
    assert run.training.device != "auto"
    result = train(tmp_path / "run", run, dataset)
    again = evaluate_run(tmp_path / "run")
    assert again.test_loss == result.test_loss
    wide = evaluate_run(tmp_path / "run", precision="float32")
    assert wide.test_loss != result.test_loss
    assert wide.test_loss == pytest.approx(result.test_loss, rel=0.02)  # 2**-8 per layer
    assert load_run(tmp_path / "run", precision="bfloat16").placement.precision == "bfloat16"


def test_float16_is_refused_on_the_cpu(tmp_path, dataset):
    run = config("gate=topk", "training.precision=float16", "training.device=cpu")
    with pytest.raises(DeviceError, match=r"training\.precision is float16, which is for CUDA only"):
        build_trainer(run, dataset, RunFolder(tmp_path / "run"))
