"""Whether routing matters to a trained model of a recipe."""

import numpy as np
import pytest
import torch

from comet_moe.devices import Placement
from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.models.build import build_model
from comet_moe.experiments.training.batches import load_dataset
from comet_moe.experiments.training.evaluate import evaluate, evaluate_held_out
from comet_moe.experiments.training.gain import MAX_ROWS, Outcome, gain_record, measure_gain
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
    assert gain.mean_routes.gain == pytest.approx(0, abs=1e-4)


def test_the_gain_is_the_difference_of_two_losses_of_the_model(data):
    model, dataset = data("gate=topk")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # so that experts differ, and the routes with the samples
    gain = measure_gain(model, dataset.test, Placement())
    assert len(dataset.test) < MAX_ROWS
    assert gain.rows == len(dataset.test)
    assert gain.interval[0] <= gain.gain <= gain.interval[1]
    assert set(gain.by_gate) == {"bought", "spend"}
    # Each task has a gate and a loss of its own.
    assert gain.gain == pytest.approx(sum(change.gain for change in gain.by_gate.values()))
    losses = {task: changes["loss"].gain for task, changes in gain.metrics.items()}
    weights = {task.name: task.weight for task in model.tasks}
    assert gain.gain == pytest.approx(
        100 * sum(weights[task] * loss for task, loss in losses.items()), rel=1e-4
    )


def test_every_part_of_the_gain_has_an_interval_around_it(data):
    model, dataset = data("gate=topk")
    gain = measure_gain(model, dataset.test, Placement(), {})
    assert gain.by_group.keys() == {"bought"}  # the classes of the one task that has them
    assert set(gain.metrics["bought"]) >= {"auc", "accuracy"}
    assert set(gain.metrics["spend"]) >= {"mse", "r2"}
    parts = [gain, gain.mean_routes, *gain.by_gate.values(), *gain.by_group["bought"].values()]
    parts += [change for changes in gain.metrics.values() for change in changes.values()]
    assert all(part.interval[0] <= part.gain <= part.interval[1] for part in parts)


def test_the_groups_share_the_gain_of_all_rows(data):
    model, dataset = data("gate=topk")
    gain = measure_gain(model, dataset.test, Placement(), {})
    groups = gain.by_group["bought"].values()
    assert sum(group.rows for group in groups) == gain.rows
    assert sum(group.rows * group.gain for group in groups) / gain.rows == pytest.approx(gain.gain)


def test_the_interval_of_a_metric_is_that_of_independent_samples(data):
    """A jackknife of a mean over rows: the standard error is about that of the mean."""
    rows = 2000
    noise = torch.randn(rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def run(kind, seed, gates):
        values = noise if kind else torch.zeros(rows, dtype=torch.float64)
        return Outcome(values, lambda units: {"task": {"mean": float(values[units].mean())}}, rows)

    change = gain_record(run, {"gate": "gate"}, np.arange(rows)).metrics["task"]["mean"]
    half = (change.interval[1] - change.interval[0]) / 2
    # Ten folds estimate a standard error within a factor of two nearly always; t with 9 degrees is 2.26.
    assert half == pytest.approx(2.26 * float(noise.std()) / rows**0.5, rel=0.6)


def test_the_summary_of_a_run_has_the_gain_and_the_model_keeps_its_mode(data):
    model, dataset = data("gate=topk")
    model.train()
    summary = evaluate_held_out(model, dataset)
    assert model.training
    assert summary.gain.rows == len(dataset.test)
    assert summary.test_loss == evaluate(model, dataset.test).loss
