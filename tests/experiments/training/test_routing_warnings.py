"""Warnings about gates that do not route: which, when, once, and kept in the result."""

import pytest
import torch
from torch import nn

from comet_moe import Permutation, PermutedGate
from comet_moe.experiments.config import load_train_config
from comet_moe.experiments.training.evaluate import routing_warnings
from comet_moe.experiments.training.records import (
    EvaluationRecord,
    ResultRecord,
    RoutingRecord,
    SummaryRecord,
)
from comet_moe.experiments.training.run import RunFolder
from comet_moe.experiments.training.trainer import Callbacks, StepLoss, Trainer
from comet_moe.gates import SoftmaxGate, TopKGate, WarmupGate

EPOCHS = 3


def routing(per_sample, information, share, n=4):
    return RoutingRecord(
        experts_per_sample=per_sample,
        share_of_samples=share,
        share_of_weight=[1 / n] * n,
        effective_experts=n,
        information=information,
        load_ratio=1,
        dead_experts=[],
    )


STATIC, BLENDS, ROUTES, DENSE = (
    routing(2, 0, [1, 1, 0, 0]),
    routing(2, 0.6, [1, 1, 0, 0]),
    routing(1, 1.2, [0.25] * 4),
    routing(4, 0, [1] * 4),
)


def test_gates_with_the_same_problem_share_a_sentence():
    found = routing_warnings({"a": STATIC, "b": ROUTES, "c": STATIC, "d": BLENDS, "e": DENSE}, epoch=2)
    assert list(found.values()) == [["a", "c"], ["d"]]
    static, blends = found
    assert static.startswith("after epoch 2, gates a, c are static: ")
    assert "(information 0.000 nats, 2.00 of 4 experts per sample, 100 % of them in common " in static
    assert blends.startswith("after epoch 2, gate d blends: ")


def test_a_gate_is_named_once():
    assert routing_warnings({"a": STATIC, "b": STATIC}, epoch=3, known=["a"]).popitem()[1] == ["b"]
    assert routing_warnings({"a": STATIC}, epoch=3, known=["a"]) == {}


def run(path, by_epoch, gate=None, **callbacks):
    """Train one parameter; ``by_epoch`` has the routing on the validation split after each epoch."""
    folder = RunFolder(path)
    model = nn.ModuleDict({"line": nn.Linear(1, 1)} | ({} if gate is None else {"gate": gate}))
    folder.start(load_train_config("multidigits", []), {"name": "line"})

    def objective(batch):
        loss = model["line"](torch.ones(1, 1)).square().sum()
        return StepLoss(loss, loss, torch.zeros(()), {})

    def evaluate():
        return EvaluationRecord(
            loss=1.0,
            tasks={"line": {}},
            experts_per_sample=1,
            flops_per_sample=0,
            routing=by_epoch[trainer.state.epoch - 1],
        )

    trainer = Trainer(
        model=model,
        objective=objective,
        batches=lambda epoch: range(1),
        steps_per_epoch=1,
        train_rows=1,
        evaluate=evaluate,
        evaluate_held_out=lambda: SummaryRecord.from_evaluations(evaluate(), evaluate(), "test"),
        save_model=lambda: None,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        epochs=EPOCHS,
        patience=EPOCHS,
        seed=0,
        result=ResultRecord(status="running", notes=["of the data"]),
        folder=folder,
        callbacks=Callbacks(**callbacks),
    )
    return trainer.run(), folder


def warned_after(folder):
    return {record.epoch: record.warnings for record in folder.metrics() if record.warnings}


def test_a_run_warns_in_the_epoch_in_which_a_gate_first_does_not_route_and_keeps_a_note(tmp_path):
    by_epoch = [{"a": ROUTES, "b": DENSE}, {"a": STATIC, "b": DENSE}, {"a": BLENDS, "b": BLENDS}]
    result, folder = run(tmp_path / "run", by_epoch)
    (second,), (third,) = warned_after(folder)[2], warned_after(folder)[3]
    assert second.startswith("after epoch 2, gate a is static: ")
    assert third.startswith("after epoch 3, gate b blends: ")
    assert result.notes == ["of the data", second, third]


def test_a_run_that_was_stopped_does_not_repeat_its_warning(tmp_path):
    by_epoch = [{"a": STATIC}] * EPOCHS
    whole, _ = run(tmp_path / "whole", by_epoch)

    def stop(record):
        if record.epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", by_epoch, on_epoch=stop)
    resumed, folder = run(tmp_path / "stopped", by_epoch)
    assert list(warned_after(folder)) == [1]
    assert resumed.notes == whole.notes


def make_search(steps):
    return PermutedGate(TopKGate(2, 4, k=1), Permutation(4, steps=steps))


@pytest.mark.parametrize("make", [make_search, lambda steps: WarmupGate(SoftmaxGate(2, 4), steps=steps)])
def test_there_is_no_warning_while_a_search_or_a_warm_up_is_on(tmp_path, make):
    by_epoch = [{"a": STATIC}] * EPOCHS
    _, folder = run(tmp_path / "short", by_epoch, gate=make(2))  # one step per epoch
    assert list(warned_after(folder)) == [2]
    result, folder = run(tmp_path / "long", by_epoch, gate=make(EPOCHS + 1))
    assert warned_after(folder) == {}
    assert result.notes == ["of the data"]
