"""One of our trials and its attempts, each of which is an Optuna trial.

User attributes of an attempt:

- ``index``: the trial.
- ``worker``: the worker that made the attempt.
- ``result``: the result of a complete or pruned run.
- ``pruned``: when it was pruned.
- ``reason``: why it failed.
- ``released``: whether its worker gave it back.
- ``rungs``: the data of a pruner.
- ``reopened``: no attempt, but a mark: what was before it does not count, and the trial is run again.
"""

import json
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from comet_moe.exceptions import needs_extra
from comet_moe.experiments.config import Choice, Distribution, LogUniform, SearchSpace
from comet_moe.experiments.studies.defaults import MAX_LOST_WORKERS, PruneMethod
from comet_moe.experiments.studies.definition import StudyDefinition
from comet_moe.experiments.studies.folder import run_name
from comet_moe.experiments.studies.records import RESULT_FIELDS, TrialRecord, TrialStatus

with needs_extra("tune", "tuning"):
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
    from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner
    from optuna.trial import FrozenTrial, TrialState

_KEPT = set(RESULT_FIELDS - {"status", "reason"} | {"routing", "routing_gain"})
"""The fields of a result that an attempt keeps."""
_FINAL: dict[TrialState, TrialStatus] = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned"}


def status_of(attempts: list[FrozenTrial]) -> TrialStatus:
    """The status of a trial from its attempts."""
    attempts = _since_reopened(attempts)
    final = _final(attempts)
    if final is not None:
        return _FINAL.get(final.state, "failed")
    if _lost_too_many_workers(attempts):
        return "failed"
    # A worker that is killed while it claims a trial has not started it.
    is_running = any(a.state == TrialState.RUNNING and "worker" in a.user_attrs for a in attempts)
    return "running" if is_running else "waiting"


def _since_reopened(attempts: list[FrozenTrial]) -> list[FrozenTrial]:
    """The attempts since the trial was last opened again; all of them if it never was."""
    marks = [number for number, attempt in enumerate(attempts) if "reopened" in attempt.user_attrs]
    return attempts[marks[-1] + 1 :] if marks else attempts


def reopening(index: int) -> FrozenTrial:
    """The mark after which the finished trial ``index`` is run again, from its checkpoint."""
    return optuna.create_trial(state=TrialState.FAIL, user_attrs={"index": index, "reopened": True})


def _final(attempts: list[FrozenTrial]) -> FrozenTrial | None:
    """The attempt that is complete, was pruned, or failed with a reason."""
    return next((a for a in attempts if a.state in _FINAL or "reason" in a.user_attrs), None)


def _lost_too_many_workers(attempts: list[FrozenTrial]) -> bool:
    """Attempts that finished an epoch do not count: the next one resumes from their checkpoint."""
    failed = [a for a in attempts if a.state == TrialState.FAIL and not a.intermediate_values]
    lost = [a for a in failed if "worker" in a.user_attrs and "released" not in a.user_attrs]
    return len(lost) >= MAX_LOST_WORKERS


def record_of(definition: StudyDefinition, gate: str, index: int, attempts: list[FrozenTrial]) -> TrialRecord:
    """The record of a trial from its attempts, oldest first."""
    status, final = status_of(attempts), _final(_since_reopened(attempts))
    known = {} if final is None else final.user_attrs
    reason = known.get("reason", known.get("pruned"))
    if status == "failed" and final is None:
        reason = f"lost {MAX_LOST_WORKERS} workers without finishing an epoch"
    workers = [a.user_attrs["worker"] for a in attempts if "worker" in a.user_attrs]
    return TrialRecord(
        gate=gate,
        index=index,
        status=status,
        reason=reason,
        attempts=len(workers),
        worker=workers[-1] if workers else None,
        run=run_name(gate, index),
        params=definition.params(gate, index),
        **(known["result"] if status in _FINAL.values() else {}),
    )


def finished_attempt(definition: StudyDefinition, record: TrialRecord) -> FrozenTrial:
    """The attempt that the finished ``record`` was made from, as far as it tells."""
    has_failed = record.status == "failed"
    told: dict[str, Any] = {"reason": record.reason} if has_failed else {"result": kept_result(record)}
    if record.status == "pruned":
        told["pruned"] = record.reason
    return optuna.create_trial(
        state=TrialState.FAIL if has_failed else TrialState[record.status.upper()],
        value=record.validation_loss if record.status == "complete" else None,
        params=definition.sampled_values(record.gate, record.index),
        distributions=optuna_space(definition.space[record.gate]),
        user_attrs={"index": record.index, "worker": record.worker, **told},
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


def decide_pruning(
    method: PruneMethod,
    epochs: int,
    study_name: str,
    attempts: Mapping[int, list[FrozenTrial]],
    index: int,
    losses: Mapping[int, float],
) -> tuple[bool, dict[str, Any]]:
    """Whether Optuna's pruner prunes trial ``index``, and what it stores with it, the rungs of Hyperband.

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
    return is_pruned, dict(study.get_trials(deepcopy=False)[index].system_attrs)


def _compared(attempts: list[FrozenTrial]) -> FrozenTrial:
    """What other trials see of a trial; one without a running or finished attempt has no losses."""
    for state in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING):
        for attempt in attempts:
            if attempt.state == state:
                return optuna.create_trial(
                    state=state,
                    value=attempt.value if state == TrialState.COMPLETE else None,
                    intermediate_values=dict(ChainMap(*(a.intermediate_values for a in reversed(attempts)))),
                    system_attrs=dict(ChainMap(*(a.user_attrs.get("rungs", {}) for a in reversed(attempts)))),
                )
    return optuna.create_trial(state=TrialState.FAIL)
