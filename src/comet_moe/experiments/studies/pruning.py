"""Whether a trial is stopped early, by Optuna's pruners.

A pruner compares Optuna trials, of which one of ours may have several: one per attempt. So it is given a
study in memory with one trial per index, in the order of the indices. A killed worker then changes neither
the comparison nor the bracket of Hyperband, which follows from the number of a trial.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from comet_moe.exceptions import needs_extra
from comet_moe.experiments.studies.table_defaults import PruneMethod

with needs_extra("tune", "tuning"):
    import optuna
    from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner
    from optuna.trial import FrozenTrial, TrialState

Key = TypeVar("Key")
Value = TypeVar("Value")

_ORDER = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
"""Of several attempts at a trial, the one that is compared: the first of these states."""


def make_pruner(method: PruneMethod, epochs: int) -> BasePruner:
    """Optuna's pruner with its defaults; ``epochs`` is the largest number of epochs of a trial."""
    if method == "median":
        return MedianPruner()
    return HyperbandPruner(min_resource=1, max_resource=epochs)


@dataclass(frozen=True)
class Decision:
    """Whether a trial is pruned, and what the pruner stores with it, such as the rungs of Hyperband."""

    is_pruned: bool
    attributes: dict[str, Any]


def decide(
    pruner: BasePruner,
    study_name: str,
    attempts: Mapping[int, list[FrozenTrial]],
    index: int,
    losses: Mapping[int, float],
) -> Decision:
    """Ask ``pruner`` about trial ``index``.

    Args:
        pruner: one of Optuna's.
        study_name: name of the study, from which Hyperband makes the bracket of a trial.
        attempts: all attempts at each trial, by index.
        index: the trial.
        losses: its validation losses by epoch, up to the epoch that has just ended.
    """
    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(storage=storage, study_name=study_name)
    for number in range(max(attempts) + 1):
        study.add_trial(
            optuna.create_trial(state=TrialState.RUNNING)
            if number == index
            else _compared(attempts.get(number, []))
        )
    study_id = storage.get_study_id_from_name(study_name)
    trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, index)
    is_pruned = False
    # From the first epoch on, since an earlier attempt may have been killed between two of them.
    for epoch, loss in sorted(losses.items()):
        storage.set_trial_intermediate_value(trial_id, epoch, loss)
        is_pruned = pruner.prune(study, storage.get_trial(trial_id))
    return Decision(is_pruned, dict(storage.get_trial(trial_id).system_attrs))


def _compared(attempts: list[FrozenTrial]) -> FrozenTrial:
    """What other trials see of a trial; one without a running or finished attempt has no losses."""
    for state in _ORDER:
        for attempt in attempts:
            if attempt.state == state:
                return optuna.create_trial(
                    state=state,
                    value=attempt.value if state == TrialState.COMPLETE else None,
                    intermediate_values=_merge(attempt.intermediate_values for attempt in attempts),
                    system_attrs=_merge(attempt.system_attrs for attempt in attempts),
                )
    return optuna.create_trial(state=TrialState.WAITING)


def _merge(of_attempts: Iterable[Mapping[Key, Value]]) -> dict[Key, Value]:
    """The losses that a trial has had, or the rungs that it has reached, in whichever attempt."""
    return {key: value for of_attempt in of_attempts for key, value in of_attempt.items()}
