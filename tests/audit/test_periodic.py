"""Audits during training: when they run, what they cost, and routers that no optimiser moves."""

import audited_models as models
import pytest
import torch
from transformers import Trainer, TrainingArguments

from comet_moe import MoE
from comet_moe.audit.callback import AuditCallback
from comet_moe.audit.periodic import PeriodicAudit
from comet_moe.experts import DenseExperts
from comet_moe.gates import TopKGate


def mixture():
    return MoE(experts=DenseExperts(4, 8, 8), gate=TopKGate(8, 4, k=2), return_routing=False)


def loss(model, batch):
    return (model(batch) - batch).square().mean(-1)


class Clock:
    """Each audit takes ten seconds, and each step one."""

    now = 0.0

    def __call__(self):
        return self.now

    def on_progress(self, line):
        if line.startswith("routes of"):
            self.now += 10


def audited_steps(share, steps):
    clock, batch = Clock(), torch.randn(32, 8)
    audits = PeriodicAudit(
        [batch],
        loss,
        interval=10,
        share=share,
        clock=clock,
        routes=0,
        repeats=1,
        progress=clock.on_progress,
    )
    model = mixture()
    for _ in range(steps):
        clock.now += 1
        audits.after_step(model)
    return list(audits.reports)


def test_audits_keep_their_share_of_the_time_after_the_first():
    assert audited_steps(1.0, 30) == [10, 20, 30]
    # After the first, at step 10, 20 s must be a quarter of the time: at step 70 that is 80 s.
    assert audited_steps(0.25, 70) == [10, 70]


@pytest.mark.parametrize("moves", [True, False])
def test_a_router_that_no_optimiser_has_is_frozen(moves):
    model, batch = mixture(), torch.randn(32, 8)
    parameters = model.parameters() if moves else model.experts.parameters()
    optimizer = torch.optim.SGD(parameters, 0.1)
    audits = PeriodicAudit([batch], loss, interval=1, share=1e9, routes=0, repeats=1)
    for _ in range(2):
        loss(model, batch).mean().backward()
        optimizer.step()
        report = audits.after_step(model)
    codes = {finding.code for finding in report.findings}
    assert ("router-frozen" in codes) is not moves


def test_the_trainer_audits(tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in models.sentences(16, 0)]
    callback = AuditCallback(models.batches(1), models.sequence_loss, interval=2, routes=0, removal=False)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True
    )
    trainer = Trainer(models.untrained(), arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    assert list(callback.audits.reports) == [2]
    (logged,) = [entry for entry in trainer.state.log_history if "audit/findings" in entry]
    assert logged["step"] == 2
