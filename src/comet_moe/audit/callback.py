"""Audits in the Trainer of transformers: ``Trainer(callbacks=[AuditCallback(batches, loss)])``."""

from typing import Any

from torch import nn

from comet_moe.audit.periodic import PeriodicAudit
from comet_moe.exceptions import needs_extra

with needs_extra("hf", "comet_moe.audit.callback"):
    from transformers import TrainerCallback


class AuditCallback(TrainerCallback):
    """A :class:`~comet_moe.audit.periodic.PeriodicAudit` after the optimiser steps of a Trainer.

    The number of findings, the routing gain and the gap to random go into ``trainer.state.log_history``.

    Args:
        arguments, options: see :class:`~comet_moe.audit.periodic.PeriodicAudit`.
    """

    def __init__(self, *arguments: Any, **options: Any):
        self.audits = PeriodicAudit(*arguments, **options)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Audit if it is due."""
        assert model is not None
        report = self.audits.after_step(model)
        if report is not None:
            state.log_history.append(
                {
                    "audit/findings": len(report.findings),
                    "audit/routing_gain": report.routing_gain["gain"],
                    "audit/gap_to_random": report.gap_to_random["gain"],
                    "step": state.global_step,
                }
            )
