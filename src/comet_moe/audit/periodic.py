"""Audits during training, within a budget of its time."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from comet_moe import checks
from comet_moe.audit.findings import sort
from comet_moe.audit.report import Finding, Report
from comet_moe.audit.run import audit, count_passes
from comet_moe.interventions import Loss, evaluating
from comet_moe.mixture.visits import find_mixtures

COUNTED = {"repeats", "routes", "removal"}
"""Options of an audit that change its number of forward passes."""


class PeriodicAudit:
    """Audits a model every ``interval`` steps, for at most ``share`` of the time.

    An audit that is due waits until all of them, itself included, take at most ``share`` of the time since
    this object was made. It is expected to take as long as the last one. Before the first one, a forward pass
    is timed: :func:`~comet_moe.audit.run.count_passes` says how many there will be. A router whose parameters
    are equal in two audits is frozen, also where ``requires_grad`` is set but no optimiser has it.

    Args:
        batches, loss, options: see :func:`comet_moe.audit.audit`.
        interval: number of training steps.
        share: budget of the time; with 1 no audit waits.
        on_report: called with each report, such as ``lambda report: print(report.text())``.

    Attributes:
        reports: all reports so far, by the number of the step.
        expected: seconds that the next audit is expected to take; None before the first is due.

    Example:
        >>> import torch
        >>> from comet_moe import MoE
        >>> from comet_moe.audit.periodic import PeriodicAudit
        >>> from comet_moe.experts import DenseExperts
        >>> from comet_moe.gates import TopKGate
        >>> moe = MoE(experts=DenseExperts(4, 8, 8), gate=TopKGate(8, 4, k=2), return_routing=False)
        >>> def loss(model, batch):
        ...     return (model(batch) - batch).square().mean(-1)
        >>> audits = PeriodicAudit([torch.randn(64, 8)], loss, interval=2, share=1.0)
        >>> for step in range(2):
        ...     report = audits.after_step(moe)  # after the step of the optimiser
        >>> list(audits.reports)
        [2]
    """

    def __init__(
        self,
        batches: Iterable[Any],
        loss: Loss,
        *,
        interval: int = 500,
        share: float = 0.05,
        on_report: Callable[[Report], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        **options: Any,
    ):
        self.reports: dict[int, Report] = {}
        self._batches, self._loss, self._options = list(batches), loss, options
        self._interval = checks.at_least_one("interval", interval)
        self._share = checks.not_negative("share", share)
        self._on_report, self._clock = on_report, clock
        self._started = clock()
        self._steps, self._spent = 0, 0.0
        self.expected: float | None = None
        self._gates: dict[str, list[Tensor]] = {}

    def after_step(self, model: nn.Module) -> Report | None:
        """Count one step; the report if an audit was due and within the budget."""
        self._steps += 1
        if self._steps % self._interval:
            return None
        if self.expected is None:
            self.expected = self._estimate(model)
        before = self._clock()
        if self._spent + self.expected > self._share * (before + self.expected - self._started):
            return None
        report = audit(model, self._batches, self._loss, **self._options)
        report.findings = sort([*report.findings, *self._unmoved(model, report)])
        self.expected = self._clock() - before
        self._spent += self.expected
        self.reports[self._steps] = report
        if self._on_report is not None:
            self._on_report(report)
        return report

    def _estimate(self, model: nn.Module) -> float:
        """Seconds of an audit, from a forward pass over the first batch, which counts in the budget."""
        before = self._clock()
        with evaluating(model), torch.no_grad():
            self._loss(model, self._batches[0])
        seconds = self._clock() - before
        self._spent += seconds
        counted = {name: self._options[name] for name in COUNTED & self._options.keys()}
        return seconds * count_passes(len(find_mixtures(model)), len(self._batches), **counted)

    def _unmoved(self, model: nn.Module, report: Report) -> list[Finding]:
        """A finding for each router that is as it was in the last audit, and is not known as frozen."""
        known = {finding.layer for finding in report.findings if finding.code == "router-frozen"}
        found = []
        for mixture in find_mixtures(model):
            now = [weight.detach().clone() for weight in mixture.gate_parameters.values()]
            last = self._gates.get(mixture.name)
            self._gates[mixture.name] = now
            if not now or last is None or mixture.name in known:
                continue
            if all(one.equal(other) for one, other in zip(now, last, strict=True)):
                message = (
                    f"no parameter of the router of {mixture.name} has moved since the last audit. Give them "
                    "to the optimiser."
                )
                found.append(Finding("router-frozen", mixture.name, 0.0, message))
        return found
