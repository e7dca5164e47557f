"""Between our trials and those of Optuna: an Optuna trial is one attempt at one of ours.

User attributes of an attempt: ``index`` identifies the trial; ``worker`` made the attempt; ``result`` is that
of a complete or pruned run; ``pruned`` tells when it was; ``reason`` why it failed; ``released`` that it was
given back by its worker.
"""

import json
from typing import Any, Literal

from comet_moe.exceptions import needs_extra
from comet_moe.experiments.config import Choice, Distribution, LogUniform
from comet_moe.experiments.studies.definition import StudyDefinition
from comet_moe.experiments.studies.folder import run_name
from comet_moe.experiments.studies.records import (
    FINISHED,
    RESULT_FIELDS,
    TrialRecord,
    TrialStatus,
    trial_routing,
)
from comet_moe.experiments.training.records import ResultRecord

with needs_extra("tune", "tuning"):
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
    from optuna.trial import FrozenTrial, TrialState

MAX_LOST_WORKERS = 5
"""Workers that a trial may lose, without finishing another epoch, before it counts as failed."""

_KEPT = RESULT_FIELDS - {"status", "reason"}
"""The fields of a result that an attempt keeps, beside ``routing``."""
_STATES = {"complete": TrialState.COMPLETE, "failed": TrialState.FAIL, "pruned": TrialState.PRUNED}


def state_of(attempts: list[FrozenTrial]) -> Literal["finished", "running", "waiting", "due"]:
    """The state of a trial; "due" if it has to be queued again."""
    states = {attempt.state for attempt in attempts}
    has_failed = any("reason" in attempt.user_attrs for attempt in attempts)
    is_ended = TrialState.COMPLETE in states or TrialState.PRUNED in states or has_failed
    if is_ended or _lost_too_many_workers(attempts):
        return "finished"
    if TrialState.RUNNING in states:
        return "running"
    return "waiting" if TrialState.WAITING in states else "due"


def _lost_too_many_workers(attempts: list[FrozenTrial]) -> bool:
    """Attempts that finished an epoch do not count: the next one resumes from their checkpoint."""
    lost = [a for a in attempts if a.state == TrialState.FAIL and "released" not in a.user_attrs]
    return sum(not attempt.intermediate_values for attempt in lost) >= MAX_LOST_WORKERS


def waiting_trial(definition: StudyDefinition, gate: str, index: int) -> FrozenTrial:
    """A new attempt."""
    return optuna.create_trial(
        state=TrialState.WAITING,
        params=definition.sampled_values(gate, index),
        distributions={
            setting: _optuna_distribution(distribution)
            for setting, distribution in definition.space[gate].items()
        },
        user_attrs={"index": index},
    )


def finished_trial(definition: StudyDefinition, record: TrialRecord) -> FrozenTrial:
    """The attempt that ``record`` was made from, as far as it tells."""
    trial = waiting_trial(definition, record.gate, record.index)
    trial.state = _STATES[record.status]
    trial.set_user_attr("worker", record.worker)
    if record.status == "failed":
        trial.set_user_attr("reason", record.reason)
        return trial
    trial.set_user_attr("result", json.loads(record.model_dump_json(include=set(_KEPT | {"routing"}))))
    if record.status == "pruned":
        trial.set_user_attr("pruned", record.reason)
    else:
        trial.value = record.validation_loss
    return trial


def kept_result(result: ResultRecord) -> dict[str, Any]:
    """What an attempt keeps of the result of its run."""
    kept: dict[str, Any] = json.loads(result.model_dump_json(include=set(_KEPT)))
    return kept | {"routing": {owner: gate.model_dump() for owner, gate in trial_routing(result).items()}}


def _optuna_distribution(distribution: Distribution) -> BaseDistribution:
    if isinstance(distribution, Choice):
        return CategoricalDistribution(distribution.choice)
    if isinstance(distribution, LogUniform):
        return FloatDistribution(*distribution.log, log=True)
    return FloatDistribution(*distribution.uniform)


def record_of(definition: StudyDefinition, gate: str, index: int, attempts: list[FrozenTrial]) -> TrialRecord:
    """The record of a trial from its attempts, oldest first."""
    status: TrialStatus = "waiting"
    reason, result, worker = None, {}, None
    for attempt in attempts:
        if attempt.state == TrialState.COMPLETE:
            status, result = "complete", json.loads(attempt.user_attrs["result"])
        elif attempt.state == TrialState.PRUNED:
            status, reason = "pruned", attempt.user_attrs["pruned"]
            result = json.loads(attempt.user_attrs["result"])
        elif "reason" in attempt.user_attrs:
            status, reason = "failed", attempt.user_attrs["reason"]
        elif attempt.state == TrialState.RUNNING:
            status = "running"
        worker = attempt.user_attrs.get("worker", worker)
        if status in FINISHED:
            break
    if status == "waiting" and _lost_too_many_workers(attempts):
        status, reason = "failed", f"lost {MAX_LOST_WORKERS} workers without finishing an epoch"
    return TrialRecord(
        gate=gate,
        index=index,
        status=status,
        reason=reason,
        attempts=sum(attempt.state != TrialState.WAITING for attempt in attempts),
        worker=worker,
        run=run_name(gate, index),
        params=definition.params(gate, index),
        **result,
    )
