"""Whether routing matters to a trained model of a recipe."""

import pytest
import torch

from comet_moe.devices import Placement
from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.models.build import build_model
from comet_moe.experiments.training.batches import load_dataset
from comet_moe.experiments.training.evaluate import evaluate, evaluate_held_out
from comet_moe.experiments.training.gain import MAX_ROWS, measure_gain
from made_tables import customers, write_table

TARGETS = "data.options.targets={bought: {kind: binary}, spend: {kind: regression}}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gain")
    table = write_table(customers(400), folder / "people.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMET_MOE_CACHE", str(folder / "cache"))

        def load(*settings):
            config = load_train_config("table", [f"data.path={table}", TARGETS, *settings])
            dataset = load_dataset(config)
            torch.manual_seed(0)
            return build_model(config, dataset.meta).eval(), dataset

        yield load


def test_a_network_without_a_mixture_has_no_gain(data):
    model, dataset = data("gate=dense")
    assert measure_gain(model, dataset.test, Placement()) is None


def test_a_static_gate_has_a_gain_of_zero_whatever_the_loss(data):
    model, dataset = data("gate=softmax")
    for name, parameter in model.named_parameters():
        if ".gates." in name:
            torch.nn.init.zeros_(parameter)
    gain = measure_gain(model, dataset.test, Placement())
    # Equal weights for all samples: sums in another order, in float32 and of losses near 100.
    assert gain.gain == pytest.approx(0, abs=1e-4)
    assert gain.mean_routes == pytest.approx(0, abs=1e-4)


def test_the_gain_is_the_difference_of_two_losses_of_the_model(data):
    model, dataset = data("gate=topk")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # so that experts differ, and the routes with the samples
    gain = measure_gain(model, dataset.test, Placement())
    assert len(dataset.test) < MAX_ROWS
    assert gain.rows == len(dataset.test)
    assert gain.interval[0] <= gain.gain <= gain.interval[1]
    assert set(gain.by_gate) == {"bought", "spend"}
    assert gain.gain == pytest.approx(
        sum(gain.by_gate.values())
    )  # each task has a gate and a loss of its own
    losses = {task: changes["loss"] for task, changes in gain.metrics.items()}
    weights = {task.name: task.weight for task in model.tasks}
    assert gain.gain == pytest.approx(
        100 * sum(weights[task] * loss for task, loss in losses.items()), rel=1e-4
    )


def test_the_summary_of_a_run_has_the_gain_and_the_model_keeps_its_mode(data):
    model, dataset = data("gate=topk")
    model.train()
    summary = evaluate_held_out(model, dataset)
    assert model.training
    assert summary.gain.rows == len(dataset.test)
    assert summary.test_loss == evaluate(model, dataset.test).loss
