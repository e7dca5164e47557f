"""Audits during training: when they run, what they cost, and routers that no optimiser moves."""

import audited_models as models
import pytest
import torch
from transformers import Trainer, TrainingArguments

from comet_moe import MoE, audit
from comet_moe.audit.callback import AuditCallback
from comet_moe.audit.periodic import PeriodicAudit
from comet_moe.audit.run import count_passes
from comet_moe.experts import DenseExperts
from comet_moe.gates import TopKGate
from comet_moe.mixture.visits import find_mixtures


def mixture():
    return MoE(experts=DenseExperts(4, 8, 8), gate=TopKGate(8, 4, k=2), return_routing=False)


def loss(model, batch):
    return (model(batch) - batch).square().mean(-1)


class Clock:
    """Each step takes one second, and so does each call of the loss in an audit."""

    def __init__(self):
        self.now, self.in_audits = 0.0, 0

    def __call__(self):
        return self.now

    def loss(self, model, batch):
        self.now, self.in_audits = self.now + 1, self.in_audits + 1
        return loss(model, batch)


OPTIONS = {"routes": 0, "repeats": 1, "removal": False}


def audited_steps(share, steps):
    clock, batch = Clock(), torch.randn(32, 8)
    audits = PeriodicAudit([batch], clock.loss, interval=10, share=share, clock=clock, **OPTIONS)
    model = mixture()
    for _ in range(steps):
        clock.now += 1
        audits.after_step(model)
        # A forward pass is timed before the first audit, however early.
        assert clock.in_audits <= max(1, share * clock.now)
    return list(audits.reports)


def test_audits_keep_their_share_of_the_time_from_the_first_on():
    assert audited_steps(1.0, 30) == [10, 20, 30]
    assert len(audited_steps(0.05, 500)) > 1
    assert audited_steps(0.05, 20) == []


@pytest.mark.parametrize("options", [OPTIONS, {"routes": 3, "repeats": 2, "removal": True}])
@pytest.mark.parametrize("make", [mixture, lambda: torch.nn.Sequential(mixture(), mixture(), mixture())])
def test_the_first_audit_is_not_expected_to_be_shorter_than_it_is(make, options):
    clock, model = Clock(), make()
    batches = [torch.randn(32, 8)] * 2
    audit(model, batches, clock.loss, **options)
    expected = count_passes(len(find_mixtures(model)), len(batches), **options)
    assert clock.in_audits <= expected < 4 * clock.in_audits


@pytest.mark.parametrize("moves", [True, False])
def test_a_router_that_no_optimiser_has_is_frozen(moves):
    model, batch = mixture(), torch.randn(32, 8)
    parameters = model.parameters() if moves else model.experts.parameters()
    optimizer = torch.optim.SGD(parameters, 0.1)
    audits = PeriodicAudit([batch], loss, interval=1, share=1.0, routes=0, repeats=1)
    for _ in range(2):
        loss(model, batch).mean().backward()
        optimizer.step()
        report = audits.after_step(model)
    codes = {finding.code for finding in report.findings}
    assert ("router-frozen" in codes) is not moves


def test_the_trainer_audits(tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in models.sentences(16, 0)]
    options = {"interval": 2, "share": 1.0, "routes": 0, "removal": False}
    callback = AuditCallback(models.batches(1), models.sequence_loss, **options)
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True
    )
    trainer = Trainer(models.untrained(), arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    assert list(callback.audits.reports) == [2]
    (logged,) = [entry for entry in trainer.state.log_history if "audit/findings" in entry]
    assert logged["step"] == 2
