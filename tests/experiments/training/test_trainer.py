"""The training loop: what it records, how it stops and resumes, and the arithmetic of its steps."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from comet_moe import Permutation
from comet_moe.devices import Placement
from comet_moe.exceptions import RunError
from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.data import load
from comet_moe.experiments.training.recipe import build_trainer
from comet_moe.experiments.training.records import EvaluationRecord, ResultRecord, SummaryRecord
from comet_moe.experiments.training.run import RunFolder, start_run
from comet_moe.experiments.training.trainer import Callbacks, OutOfTime, StepLoss, Trainer
from comet_moe.files import ALIGNMENT

SMALL = ["data.options.train_size=400", "data.options.validation_size=200", "data.options.test_size=200"]


def config(*settings):
    return load_train_config("multidigits", [*SMALL, "training.epochs=3", "training.threads=1", *settings])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    options = config().data.options
    return load("multidigits", cache=tmp_path_factory.mktemp("cache"), **options)


def train(path, run, dataset, **callbacks):
    folder = RunFolder(path)
    trainer = build_trainer(run, dataset, folder, callbacks=Callbacks(**callbacks))
    start_run(folder, run, dataset)
    return trainer.run(), folder


def without_seconds(result):
    return result.model_copy(update={"seconds": 0})


def test_a_run_leaves_a_complete_folder(tmp_path, dataset):
    run = config("gate=comet+")
    result, folder = train(tmp_path / "run", run, dataset)
    assert folder.config() == run
    assert folder.result() == result
    records = folder.metrics()
    assert [record.epoch for record in records] == [1, 2, 3]
    high, low = run.search.tau
    assert low < records[0].tau < high
    assert len(records[0].permutations) == 1
    assert records[0].train_routing.keys() == records[0].validation.tasks.keys() == result.tasks.keys()
    assert records[0].train_distillation is None
    assert result.status == "complete"
    assert result.validation_loss == min(record.validation.loss for record in records)
    assert result.parameters == sum(
        value.numel() for name, value in folder.model().items() if is_parameter(name)
    )


def is_parameter(name):
    return not name.endswith((".progress", ".fixed"))  # buffers of a search


def test_the_result_depends_on_the_seed_alone(tmp_path, dataset):
    def result(name, *settings):
        return without_seconds(train(tmp_path / name, config(*settings), dataset)[0])

    assert result("a") == result("b")
    assert result("c", "seed=1").test_loss != result("d").test_loss


@pytest.mark.parametrize(
    ("gate", "precision"), [("comet+", "float32"), ("topk", "float32"), ("comet+", "bfloat16")]
)
def test_a_run_that_was_stopped_resumes_to_the_same_result(tmp_path, dataset, gate, precision):
    plateau = ["training.schedule=plateau", "training.patience=1"]
    run = config(f"gate={gate}", "search.epochs=2", f"training.precision={precision}", *plateau)
    uninterrupted, whole = train(tmp_path / "whole", run, dataset)

    class Killed(Exception):
        pass

    for epoch, step in ((1, 2), (2, 3), (3, 1)):  # each time a little further, from the last checkpoint

        def stop(progress, epoch=epoch, step=step):
            if (progress.epoch, progress.step) == (epoch, step):
                raise Killed

        with pytest.raises(Killed):
            train(tmp_path / "stopped", run, dataset, on_batch=stop)
    resumed, folder = train(tmp_path / "stopped", run, dataset)
    assert without_seconds(resumed) == without_seconds(uninterrupted)
    assert len(folder.metrics()) == 3
    assert folder.model_file.read_bytes() == whole.model_file.read_bytes()


def test_weights_and_checkpoints_are_loaded_into_aligned_memory(tmp_path, dataset):
    _, folder = train(tmp_path / "run", config("training.epochs=1", "gate=comet+"), dataset)
    tensors, _ = folder.checkpoint()
    for tensor in (*tensors.values(), *folder.model().values()):
        assert tensor.data_ptr() % ALIGNMENT == 0


def test_early_stopping_counts_from_the_best_epoch(tmp_path, dataset):
    run = config("training.epochs=30", "training.patience=1", "training.learning_rate=0.05")
    result, _ = train(tmp_path / "run", run, dataset)
    assert result.epochs == result.best_epoch + 1 < 30


def test_a_diverging_run_ends_with_a_reason(tmp_path, dataset):
    result, folder = train(tmp_path / "run", config("training.learning_rate=1e30"), dataset)
    assert result.status == "failed"
    assert "loss is" in result.reason
    assert folder.state() == "finished"


def test_a_damaged_checkpoint_is_named(tmp_path, dataset):
    _, folder = train(tmp_path / "run", config("training.epochs=1"), dataset)
    data = folder.checkpoint_file.read_bytes()
    folder.checkpoint_file.write_bytes(data[: len(data) // 2])
    with pytest.raises(RunError, match=r"state\.safetensors cannot be read .* delete it"):
        folder.checkpoint()


def test_a_damaged_result_is_named(tmp_path, dataset):
    _, folder = train(tmp_path / "run", config("training.epochs=1"), dataset)
    folder.result_file.write_text('{"status": "complete", "usage": {}}')
    with pytest.raises(RunError, match=r"result\.json is not valid .*usage.* restore it"):
        folder.result()


def test_data_that_changed_is_refused(tmp_path, dataset):
    run = config("training.epochs=1")
    _, folder = train(tmp_path / "run", run, dataset)
    changed = replace(dataset, meta={**dataset.meta, "seed": 7})
    with pytest.raises(RunError, match=r"data of multidigits is not what .* started with \(seed changed\)"):
        start_run(folder, run, changed)


class Line(nn.Module):
    """y = w, to be brought to 1."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.0))


def line_trainer(folder, loss=lambda w: (w - 1) ** 2, **given):
    """Two steps per epoch of gradient descent on ``loss``; the metric is the negative loss."""
    model = Line()
    if folder is not None:
        folder.start(config(), {"name": "line"})

    def objective(batch):
        value = loss(model.w)
        return StepLoss(value, value, torch.zeros(()), {})

    def evaluate():
        value = float(loss(model.w.detach()))
        return EvaluationRecord(
            loss=100 * value,
            tasks={"line": {"metric": -value}},
            experts_per_sample=1,
            flops_per_sample=0,
            routing={},
        )

    settings = {
        "epochs": 3,
        "patience": 3,
        "seed": 0,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.25),
        "result": ResultRecord(status="running"),
    }
    if folder is not None:
        settings |= {
            "folder": folder,
            "evaluate_held_out": lambda: SummaryRecord.from_evaluations(evaluate(), evaluate(), "test"),
            "save_model": lambda: folder.write_model(model.state_dict()),
        }
    return Trainer(
        model=model,
        objective=objective,
        batches=lambda epoch: range(2),
        steps_per_epoch=2,
        train_rows=2,
        **{"evaluate": evaluate, **settings, **given},
    )


def test_steps_are_those_of_the_optimiser(tmp_path):
    folder = RunFolder(tmp_path / "run")
    line_trainer(folder).run()
    # Each step halves the distance from 1.
    assert folder.model()["w"].item() == 1 - 0.5**6
    assert [record.train_loss for record in folder.metrics()] == [62.5, 3.90625, 0.244140625]


def test_without_a_folder_training_is_the_same_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = line_trainer(None)
    result = trainer.run()
    assert trainer.model.w.item() == 1 - 0.5**6
    assert [record.train_loss for record in trainer.history] == [62.5, 3.90625, 0.244140625]
    assert (result.status, result.best_epoch, result.test_loss) == ("complete", 3, None)
    assert list(tmp_path.iterdir()) == []


def test_without_validation_rows_all_epochs_are_trained_and_the_last_one_is_kept():
    trainer = line_trainer(None, evaluate=None, patience=1)
    result = trainer.run()
    assert (result.status, result.epochs, result.best_epoch) == ("complete", 3, 3)
    assert trainer.model.w.item() == 1 - 0.5**6
    assert trainer.history[0].validation.loss is None


def test_without_validation_rows_a_run_resumes(tmp_path):
    def stop(record):
        raise KeyboardInterrupt

    folder = RunFolder(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        line_trainer(folder, evaluate=None, callbacks=Callbacks(on_epoch=stop)).run()
    resumed = line_trainer(None, evaluate=None)
    resumed.folder = folder
    assert resumed.run().epochs == 3
    assert resumed.model.w.item() == 1 - 0.5**6


def test_a_network_that_grows_after_plateaus_starts_at_the_whole_learning_rate():
    rates = []

    def follow(record):
        rates.append(trainer.optimizer.param_groups[0]["lr"])

    def grow():
        return trainer.objective

    settings = {"decays_on_plateau": True, "patience": 3, "epochs": 4, "dense_epochs": 3, "grow": grow}
    trainer = line_trainer(None, lambda w: 0 * w, callbacks=Callbacks(on_epoch=follow), **settings)
    trainer.run()
    assert rates == pytest.approx([0.25, 0.25, 0.25 * 0.3, 0.25])


def test_a_schedule_scales_the_learning_rate_of_every_step(tmp_path):
    trainer = line_trainer(RunFolder(tmp_path / "run"), schedule=lambda step: [1, 0, 0, 2, 0, 0][step])
    trainer.run()
    # The first step halves the distance from 1, the fourth one, at a learning rate of 0.5, ends it.
    assert trainer.state.best_epoch == 2
    assert trainer.folder.model()["w"].item() == 1


def test_on_a_plateau_the_learning_rate_falls_until_patience_ends():
    rates = []

    def follow(record):
        rates.append(trainer.optimizer.param_groups[0]["lr"])

    # The distance from 1 changes its sign in every step and keeps its size, until the rate falls.
    settings = {
        "decays_on_plateau": True,
        "patience": 6,
        "epochs": 30,
        "callbacks": Callbacks(on_epoch=follow),
    }
    trainer = line_trainer(None, **settings)
    trainer.learning_rates = [1.0]
    result = trainer.run()
    # Two epochs without improvement after the first, then 0.3, with which every step improves.
    assert rates[:4] == [1.0, 1.0, 1.0, 0.3]
    assert result.validation_loss is None
    assert trainer.model.w.item() == pytest.approx(1)
    assert result.converged == (result.epochs < 30)


@pytest.mark.parametrize(("epochs", "patience", "converged"), [(3, 3, False), (3, 1, False), (200, 3, True)])
def test_a_run_has_converged_if_its_validation_loss_has_stopped_to_fall(epochs, patience, converged):
    assert line_trainer(None, epochs=epochs, patience=patience).run().converged is converged


def test_a_run_that_is_out_of_time_ends_with_the_step_and_keeps_what_it_has(tmp_path, monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr("comet_moe.experiments.training.trainer.time.perf_counter", lambda: next(seconds))

    def stop(progress):
        if (progress.epoch, progress.step) == (2, 1):
            raise OutOfTime

    folder = RunFolder(tmp_path / "run")
    result = line_trainer(folder, callbacks=Callbacks(on_batch=stop)).run()
    assert (result.status, result.converged, result.epochs, result.best_epoch) == ("complete", False, 2, 2)
    # The first epoch has its two rows and the second one of them, both in the same time.
    speeds = [record.samples_per_second for record in folder.metrics()]
    assert speeds == pytest.approx([2, 1])
    # Three steps, each halves the distance from 1; the second epoch has the loss of one step.
    assert folder.model()["w"].item() == 1 - 0.5**3
    assert [record.train_loss for record in folder.metrics()] == [62.5, 6.25]


def test_the_norm_of_the_gradient_is_limited(tmp_path):
    folder = RunFolder(tmp_path / "run")
    line_trainer(folder, clip=0.1, epochs=1).run()
    # clip_grad_norm_ divides by the norm plus 1e-6.
    assert folder.model()["w"].item() == pytest.approx(2 * 0.25 * 0.1, rel=1e-5)


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_norm_is_that_of_all_gradients_where_some_are_spread_over_ranks(mesh):
    model = nn.Module()
    model.plain = nn.Parameter(torch.tensor([3.0, 0.0]))
    model.spread = nn.Parameter(distribute_tensor(torch.tensor([4.0, 0.0]), mesh, [Shard(0)]))

    def objective(batch):
        loss = (model.plain.square().sum() + model.spread.to_local().square().sum()) / 2  # gradient (3, 4)
        return StepLoss(loss, loss, torch.zeros(()), {})

    trainer = Trainer(
        model=model,
        objective=objective,
        batches=lambda epoch: range(1),
        steps_per_epoch=1,
        train_rows=1,
        evaluate=None,
        optimizer=torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=1.0),
        epochs=1,
        patience=1,
        seed=0,
        result=ResultRecord(status="running"),
        clip=1.0,
    )
    assert trainer.run().status == "complete"
    assert model.plain[0].item() == pytest.approx(3 - 3 / 5, rel=1e-5)
    assert model.spread.full_tensor()[0].item() == pytest.approx(4 - 4 / 5, rel=1e-5)


@pytest.mark.parametrize(("factor", "steps"), [(1.0, 2), (1e35, 0)])
def test_a_search_does_not_move_where_float16_gradients_overflow_and_the_step_is_left_out(factor, steps):
    """The loss is scaled by 65536: gradients of 1e35 are infinite then, even in float32."""
    trainer = line_trainer(
        None, lambda w: w * factor, epochs=1, evaluate=None, placement=Placement(precision="float16")
    )
    trainer.model.search = Permutation(4, steps=10)
    trainer.run()
    assert int(trainer.model.search.progress) == steps
    assert (trainer.model.w.item() != 0) == (steps > 0)


def test_the_epoch_with_the_lowest_selection_loss_is_kept(tmp_path):
    folder = RunFolder(tmp_path / "run")
    result = line_trainer(folder, selection_loss=lambda validation: validation.tasks["line"]["metric"]).run()
    assert (result.best_epoch, result.epochs) == (1, 3)
    assert folder.metrics()[-1].best_validation_loss == folder.metrics()[0].validation.loss
    assert folder.model()["w"].item() == 1 - 0.5**2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_before_the_weights_are_changed(tmp_path, value):
    folder = RunFolder(tmp_path / "run")

    def loss(w):
        return (w - 1) ** 2 if w < 0.6 else value * w

    trainer = line_trainer(folder, loss)
    result = trainer.run()
    assert result.status == "failed"
    assert result.reason == f"the validation loss is {value} after epoch 1"
    assert folder.state() == "finished"
    assert folder.metrics() == []
    trainer = line_trainer(RunFolder(tmp_path / "step"), lambda w: (w - 1) ** 2 if w < 0.4 else value * w)
    assert trainer.run().reason == f"the loss is {value} at step 2 of epoch 1"
    assert trainer.model.w.item() == 0.5
