"""Statistics reach TensorBoard, W&B, MLflow and any function, under the same names."""

import pytest
import torch

from comet_moe import RoutingMonitor
from comet_moe.gates import TopKGate

NAMES = [
    f"routing/rating/{name}"
    for name in (
        "experts_per_sample",
        "effective_experts",
        "information",
        "selection_information",
        "shared_experts",
        "load_ratio",
        "dead_experts",
    )
]


def log_twice(log, *steps):
    """Three training passes with a log each, of which the first and the last are new; what was written."""
    torch.manual_seed(0)
    gate = TopKGate(8, 4, k=2)
    with RoutingMonitor(gate, interval=2, names=["rating"], log=log) as monitor:
        written = []
        for step in steps or (None, None, None):
            gate(torch.randn(16, 8))
            written.append(monitor.log(step))
    assert [list(values) for values in written] == [NAMES, [], NAMES]
    return written[0], written[2]


def test_a_function_gets_the_values():
    found = []
    assert log_twice(found.append) == tuple(found)
    assert found[0]["routing/rating/experts_per_sample"] == 2


def test_several_places_get_the_same():
    first, second = [], []
    log_twice([first.append, second.append])
    assert first == second
    assert len(first) == 2


def test_evaluation_has_names_of_its_own():
    gate = TopKGate(8, 4, k=2).eval()
    with RoutingMonitor(gate) as monitor:
        gate(torch.randn(16, 8))
        assert monitor.log()["routing_evaluation/gate/experts_per_sample"] == 2
        assert monitor.log() == {}


@pytest.mark.parametrize(("steps", "wanted"), [((), [1, 3]), ((10, 20, 30), [10, 30])])
def test_tensorboard_has_every_value_at_its_step(tmp_path, steps, wanted):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        written = log_twice(writer, *steps)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(NAMES)
    for name in NAMES:
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == wanted
        assert [scalar.value for scalar in scalars] == pytest.approx([values[name] for values in written])


@pytest.mark.parametrize(("steps", "wanted"), [((), [1, 3]), ((10, 20, 30), [10, 30])])
def test_mlflow_has_every_value_at_its_step(tmp_path, monkeypatch, steps, wanted):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    address = (tmp_path / "runs").as_uri()
    mlflow.set_tracking_uri(address)
    with mlflow.start_run() as run:
        written = log_twice(mlflow, *steps)
    client = mlflow.MlflowClient(address)
    for name in NAMES:
        history = client.get_metric_history(run.info.run_id, name)
        assert [metric.step for metric in history] == wanted
        assert [metric.value for metric in history] == [values[name] for values in written]


def test_wandb_has_the_last_values_of_the_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path)) as run:
        *_, last = log_twice(run)
        assert {name: run.summary[name] for name in NAMES} == last
        assert run.step == 2
        *_, last = log_twice(run, 10, 20, 30)
        assert run.step == 30
        log_twice(wandb)
