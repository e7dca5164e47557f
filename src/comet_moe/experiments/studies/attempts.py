"""One of our trials and its attempts, each of which is an Optuna trial.

User attributes of an attempt:

- ``index``: the trial.
- ``worker``: the worker that made the attempt.
- ``result``: the result of a complete or pruned run.
- ``pruned``: when it was pruned.
- ``reason``: why it failed.
- ``released``: whether its worker gave it back.
- ``rungs``: the data of a pruner.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from comet_moe.exceptions import needs_extra
from comet_moe.experiments.config import Choice, Distribution, LogUniform, SearchSpace
from comet_moe.experiments.studies.defaults import MAX_LOST_WORKERS, PruneMethod
from comet_moe.experiments.studies.definition import StudyDefinition
from comet_moe.experiments.studies.folder import run_name
from comet_moe.experiments.studies.records import FINISHED, RESULT_FIELDS, TrialRecord, TrialStatus

with needs_extra("tune", "tuning"):
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
    from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner
    from optuna.trial import FrozenTrial, TrialState

Key = TypeVar("Key")
Value = TypeVar("Value")

_KEPT = set(RESULT_FIELDS - {"status", "reason"} | {"routing"})
"""The fields of a result that an attempt keeps."""
_STATES = {"complete": TrialState.COMPLETE, "failed": TrialState.FAIL, "pruned": TrialState.PRUNED}


def state_of(attempts: list[FrozenTrial]) -> Literal["finished", "running", "waiting"]:
    """The state of a trial."""
    states = {attempt.state for attempt in attempts}
    has_failed = any("reason" in attempt.user_attrs for attempt in attempts)
    is_ended = TrialState.COMPLETE in states or TrialState.PRUNED in states or has_failed
    if is_ended or _lost_too_many_workers(attempts):
        return "finished"
    return "running" if any(map(_is_running, attempts)) else "waiting"


def _is_running(attempt: FrozenTrial) -> bool:
    """Whether a worker has started the attempt; one that is killed while it claims a trial has not."""
    return attempt.state == TrialState.RUNNING and "worker" in attempt.user_attrs


def _lost_too_many_workers(attempts: list[FrozenTrial]) -> bool:
    """Attempts that finished an epoch do not count: the next one resumes from their checkpoint."""
    failed = [a for a in attempts if a.state == TrialState.FAIL and not a.intermediate_values]
    lost = [a for a in failed if "worker" in a.user_attrs and "released" not in a.user_attrs]
    return len(lost) >= MAX_LOST_WORKERS


def record_of(definition: StudyDefinition, gate: str, index: int, attempts: list[FrozenTrial]) -> TrialRecord:
    """The record of a trial from its attempts, oldest first."""
    status: TrialStatus = "waiting"
    reason, result, worker = None, {}, None
    for attempt in attempts:
        attributes = attempt.user_attrs
        if attempt.state in (TrialState.COMPLETE, TrialState.PRUNED):
            status = "complete" if attempt.state == TrialState.COMPLETE else "pruned"
            reason, result = attributes.get("pruned"), attributes["result"]
        elif "reason" in attributes:
            status, reason = "failed", attributes["reason"]
        elif _is_running(attempt):
            status = "running"
        worker = attributes.get("worker", worker)
        if status in FINISHED:
            break
    if status == "waiting" and _lost_too_many_workers(attempts):
        status, reason = "failed", f"lost {MAX_LOST_WORKERS} workers without finishing an epoch"
    return TrialRecord(
        gate=gate,
        index=index,
        status=status,
        reason=reason,
        attempts=sum("worker" in attempt.user_attrs for attempt in attempts),
        worker=worker,
        run=run_name(gate, index),
        params=definition.params(gate, index),
        **result,
    )


def finished_attempt(definition: StudyDefinition, record: TrialRecord) -> FrozenTrial:
    """The attempt that the finished ``record`` was made from, as far as it tells."""
    attributes: dict[str, Any] = {"index": record.index, "worker": record.worker}
    if record.status == "failed":
        attributes["reason"] = record.reason
    else:
        attributes["result"] = kept_result(record)
    if record.status == "pruned":
        attributes["pruned"] = record.reason
    return optuna.create_trial(
        state=_STATES[record.status],
        value=record.validation_loss if record.status == "complete" else None,
        params=definition.sampled_values(record.gate, record.index),
        distributions=optuna_space(definition.space[record.gate]),
        user_attrs=attributes,
    )


def kept_result(record: TrialRecord) -> dict[str, Any]:
    """What an attempt keeps of the result of its run."""
    kept: dict[str, Any] = json.loads(record.model_dump_json(include=_KEPT))
    return kept


def optuna_space(space: SearchSpace) -> dict[str, BaseDistribution]:
    """The distributions of ``space`` as Optuna's."""
    return {setting: _optuna_distribution(distribution) for setting, distribution in space.items()}


def _optuna_distribution(distribution: Distribution) -> BaseDistribution:
    if isinstance(distribution, Choice):
        return CategoricalDistribution(distribution.choice)
    if isinstance(distribution, LogUniform):
        return FloatDistribution(*distribution.log, log=True)
    return FloatDistribution(*distribution.uniform)


@dataclass(frozen=True)
class PruneDecision:
    """Whether a trial is pruned, and what the pruner stores with it, such as the rungs of Hyperband."""

    is_pruned: bool
    rungs: dict[str, Any]


def decide_pruning(
    method: PruneMethod,
    epochs: int,
    study_name: str,
    attempts: Mapping[int, list[FrozenTrial]],
    index: int,
    losses: Mapping[int, float],
) -> PruneDecision:
    """Ask Optuna's pruner about trial ``index``.

    A pruner compares Optuna trials, and one of ours may have several. So it sees a study in memory with one
    trial per index. A killed worker then changes neither the comparison nor the bracket of Hyperband, which
    follows from the number of a trial.

    Args:
        method: name of the pruner.
        epochs: largest number of epochs of a trial.
        study_name: name of the study, from which Hyperband makes the bracket of a trial.
        attempts: all attempts at each trial, by index.
        index: the trial.
        losses: its validation losses by epoch, up to the epoch that has just ended.
    """
    pruner: BasePruner = MedianPruner() if method == "median" else HyperbandPruner(1, epochs)
    sampler = optuna.samplers.RandomSampler()
    study = optuna.create_study(study_name=study_name, pruner=pruner, sampler=sampler)
    for number in range(max(attempts) + 1):
        is_asked = number == index
        study.add_trial(
            optuna.create_trial(state=TrialState.WAITING) if is_asked else _compared(attempts.get(number, []))
        )
    trial = study.ask()  # the only one that is waiting
    is_pruned = False
    # From the first epoch on, since an earlier attempt may have been killed between two of them.
    for epoch, loss in sorted(losses.items()):
        trial.report(loss, epoch)
        is_pruned = trial.should_prune()
    return PruneDecision(is_pruned, dict(study.get_trials(deepcopy=False)[index].system_attrs))


def _compared(attempts: list[FrozenTrial]) -> FrozenTrial:
    """What other trials see of a trial; one without a running or finished attempt has no losses."""
    for state in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING):
        for attempt in attempts:
            if attempt.state == state:
                return optuna.create_trial(
                    state=state,
                    value=attempt.value if state == TrialState.COMPLETE else None,
                    intermediate_values=_merge(attempt.intermediate_values for attempt in attempts),
                    system_attrs=_merge(attempt.user_attrs.get("rungs", {}) for attempt in attempts),
                )
    return optuna.create_trial(state=TrialState.FAIL)


def _merge(of_attempts: Iterable[Mapping[Key, Value]]) -> dict[Key, Value]:
    """The losses that a trial has had, or the rungs that it has reached, in whichever attempt."""
    return {key: value for of_attempt in of_attempts for key, value in of_attempt.items()}
