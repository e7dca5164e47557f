"""The attempts at the trials of one gate, each read from the storage until it is finished, and then no more.

Optuna's cache does the same, but keeps all of a finished attempt in every process of a study, about 7 kB
each. Here what no one asks for again is dropped.
"""

import json
from collections.abc import Iterator
from typing import Any

from comet_moe.exceptions import needs_extra

with needs_extra("tune", "tuning"):
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, TrialState

SLOWER_ALONE = 10
"""How much longer it takes to read an attempt alone than among all."""
_UNFINISHED = (TrialState.WAITING, TrialState.RUNNING)
_DROPPED: dict[str, Any] = {}


class AttemptReader:
    """The attempts in one of Optuna's studies.

    Args:
        storage: the storage itself, not one that Optuna has wrapped in its cache.
        study_id: Optuna's id of the study.
    """

    def __init__(self, storage: BaseStorage, study_id: int):
        self._storage = storage
        self._study_id = study_id
        self._finished: dict[int, FrozenTrial] = {}
        self._count = 0

    def read(self) -> list[FrozenTrial]:
        """All attempts as they are now, oldest first.

        A finished one is without parameters and distributions, and its ``result`` is a JSON text.
        """
        attempts = {attempt.number: attempt for attempt in self._read_new()}
        self._count = max(self._count, *(number + 1 for number in attempts), 0)
        for number, attempt in attempts.items():
            if attempt.state.is_finished():
                self._finished[number] = _compact(attempt)
        return [attempt for _, attempt in sorted((attempts | self._finished).items())]

    def unfinished(self) -> list[FrozenTrial]:
        """The attempts that are waiting or running."""
        return self._storage.get_all_trials(self._study_id, deepcopy=False, states=_UNFINISHED)

    def _read_new(self) -> Iterator[FrozenTrial]:
        """All attempts that are not known to be finished."""
        if not self._finished:
            yield from self._storage.get_all_trials(self._study_id, deepcopy=False)
            return
        unfinished = self.unfinished()
        yield from unfinished
        # Those that have finished since the last time; Optuna numbers the attempts from 0 without gaps.
        known = self._finished.keys() | {attempt.number for attempt in unfinished}
        count = max(self._count, *(number + 1 for number in known))
        missing = sorted(set(range(count)) - known)
        if len(missing) > count // SLOWER_ALONE:
            yield from self._storage.get_all_trials(self._study_id, deepcopy=False)
            return
        for number in missing:
            yield from self._read_one(number)
        while attempts := self._read_one(count):
            yield from attempts
            count += 1

    def _read_one(self, number: int) -> list[FrozenTrial]:
        try:
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        except KeyError:
            return []
        return [self._storage.get_trial(trial_id)]


def _compact(attempt: FrozenTrial) -> FrozenTrial:
    attempt.params = attempt.distributions = _DROPPED
    if "result" in attempt.user_attrs:
        attempt.set_user_attr("result", json.dumps(attempt.user_attrs["result"]))
    return attempt
