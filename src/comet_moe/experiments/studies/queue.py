"""The trials of a study in its storage: queued in order, then claimed one by one by workers on any machine.

Each gate has an Optuna study, STUDY/GATE, which `optuna-dashboard` opens; each attempt at a trial is one of
Optuna's trials (optuna_trials.py). A trial is finished once an attempt is complete, was pruned, or has failed
with a reason. An attempt that ended otherwise (its worker was killed, or asked to stop) has no reason, and
the trial is queued again.
"""

import functools
import logging
import math
import os
import socket
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from comet_moe.exceptions import StudyError, needs_extra
from comet_moe.experiments.studies.attempts import AttemptReader
from comet_moe.experiments.studies.definition import StudyDefinition, check_configurations, parse_definition
from comet_moe.experiments.studies.optuna_trials import (
    finished_trial,
    kept_result,
    record_of,
    state_of,
    waiting_trial,
)
from comet_moe.experiments.studies.pruning import decide, make_pruner
from comet_moe.experiments.studies.records import TrialRecord, TrialStatus
from comet_moe.experiments.studies.storage import Storage
from comet_moe.experiments.training.records import ResultRecord

with needs_extra("tune", "tuning"):
    import optuna
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import FrozenTrial, TrialState

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MAX_WAITING = 20
"""Waiting trials of a gate in the storage: they are slow to write, and all are read for each claim."""


@dataclass(frozen=True)
class Claim:
    """A trial that a worker has claimed; ``trial_id`` is Optuna's id of the attempt."""

    gate: str
    index: int
    trial_id: int


class TrialReassigned(Exception):
    """The trial belongs to another worker, as this one missed its heartbeats. Stays inside tuning."""


def _retried(
    method: Callable[Concatenate["TrialQueue", Arguments], Result],
) -> Callable[Concatenate["TrialQueue", Arguments], Result]:
    """A method that is repeated while the storage is unreachable, see `Storage.retry`."""

    @functools.wraps(method)
    def repeat(self: "TrialQueue", /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return self.storage.retry(lambda: method(self, *args, **kwargs))

    return repeat


class TrialQueue:
    """The trials of the study ``name`` in ``storage``."""

    def __init__(self, storage: Storage, name: str):
        if "/" in name:
            raise StudyError(f"the name of a study cannot contain a slash, got {name!r}")
        optuna.logging.set_verbosity(logging.WARNING)
        self.storage = storage
        self.name = name
        self._studies: dict[str, optuna.Study] = {}
        self._readers: dict[str, AttemptReader] = {}
        self._finished: dict[tuple[str, int], TrialRecord] = {}

    @_retried
    def find_definition(self) -> StudyDefinition | None:
        """The definition of the study; None if the storage has no study of this name."""
        for name in optuna.get_all_study_names(self.storage.optuna):
            if name.startswith(f"{self.name}/"):
                gate = name.removeprefix(f"{self.name}/")
                study = self._study(gate)
                text = study.user_attrs.get("definition")
                if text is not None:
                    return parse_definition(text, f"study {self.name}")
                if self._reader(gate).read():
                    raise StudyError(
                        f"the storage has a study {name} that comet-moe did not write: choose another --name"
                    )
        return None

    def definition(self) -> StudyDefinition:
        """The definition of the study; raises StudyError if it is gone."""
        definition = self.find_definition()
        if definition is None:
            raise StudyError(f"the storage has no study {self.name} any more: restore the storage")
        return definition

    @_retried
    def create(self, definition: StudyDefinition) -> StudyDefinition:
        """Write the study, unless another machine has; returns the definition that is in the storage.

        An existing definition is written again, as its writer may have been killed between two gates.
        """
        with self.storage.lock(self.name):
            saved = self.find_definition() or definition
            self._write(saved)
            return saved

    def extend(self, trials: int = 0, gates: StudyDefinition | None = None) -> StudyDefinition:
        """Plan ``trials`` more trials per gate, and the gates of the definition ``gates``.

        A gate that another machine has added in the meantime stays as it is. Returns the new definition.
        """
        with self.storage.lock(self.name):
            saved = self.definition()
            extended = saved.model_copy(update={"trials": saved.trials + trials})
            check_configurations(extended, first=saved.trials)
            if gates is not None:
                check_configurations(gates.model_copy(update={"trials": extended.trials}), first=0)
                merged = {  # in the order in which they were added
                    "base": saved.base | gates.base | saved.base,
                    "space": saved.space | gates.space | saved.space,
                }
                extended = extended.model_copy(update=merged)
            self._write(extended)
            return extended

    def _write(self, definition: StudyDefinition) -> None:
        """Write the study of every gate, then their definitions: a definition never names a missing study."""
        studies = [
            optuna.create_study(
                storage=self.storage.optuna, study_name=f"{self.name}/{gate}", load_if_exists=True
            )
            for gate in definition.gates
        ]
        text = definition.model_dump_json()
        for study in studies:
            study.set_user_attr("definition", text)

    @_retried
    def fill(self, definition: StudyDefinition, gates: Sequence[str] | None = None) -> int:
        """Queue the next trials of each gate, also those whose heartbeat stopped.

        Args:
            definition: definition of the study.
            gates: gates whose trials are counted; None for all.

        Returns the number of their unfinished trials: waiting, running, or not queued yet.
        """
        num_unfinished = 0
        with self.storage.lock(self.name), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            for gate in definition.gates:
                study = self._study(gate)
                optuna.storages.fail_stale_trials(study)
                states = {index: state_of(attempts) for index, attempts in self._attempts(gate).items()}
                due = [i for i in range(definition.trials) if states.get(i, "due") == "due"]
                num_waiting = sum(state == "waiting" for state in states.values())
                for index in due[: max(MAX_WAITING - num_waiting, 0)]:
                    self._add(gate, waiting_trial(definition, gate, index))
                if gates is not None and gate not in gates:
                    continue
                num_unfinished += sum(states.get(i) != "finished" for i in range(definition.trials))
        return num_unfinished

    def add_finished(self, definition: StudyDefinition, records: Iterable[TrialRecord]) -> None:
        """Add finished trials to a new study."""
        for record in records:
            self._add(record.gate, finished_trial(definition, record))

    @_retried
    def claim(self, definition: StudyDefinition, gates: Sequence[str] | None = None) -> Claim | None:
        """Claim the waiting trial of lowest index, gates in turn; None if no trial is waiting.

        Args:
            definition: definition of the study.
            gates: gates whose trials may be claimed, in the order of their turns; None for all.
        """
        gates = definition.gates if gates is None else gates
        storage = self.storage.optuna
        with self.storage.lock(self.name):
            waiting = [
                (trial.user_attrs["index"], position, trial.number)
                for position, gate in enumerate(gates)
                for trial in self._reader(gate).unfinished()
                if trial.state == TrialState.WAITING and "index" in trial.user_attrs
            ]
            if not waiting:
                return None
            index, position, number = min(waiting)
            gate = gates[position]
            trial_id = self._trial_id(gate, number)
            # The heartbeat first: Optuna never treats a running trial without one as stale.
            storage.record_heartbeat(trial_id)
            storage.set_trial_user_attr(trial_id, "worker", f"{socket.gethostname()}:{os.getpid()}")
            is_ours = storage.set_trial_state_values(trial_id, TrialState.RUNNING)
        return Claim(gate, index, trial_id) if is_ours else None

    @_retried
    def report(self, claim: Claim, epoch: int, validation_loss: float | None) -> None:
        """Store the validation loss of an epoch; raises TrialReassigned if the trial is no longer ours."""
        loss = math.nan if validation_loss is None else validation_loss
        try:
            self.storage.optuna.set_trial_intermediate_value(claim.trial_id, epoch, loss)
        except UpdateFinishedTrialError as error:
            raise TrialReassigned from error

    def send_heartbeat(self, claim: Claim) -> None:
        """Record that the worker of the trial is alive."""
        with self.storage.one_call:
            self.storage.optuna.record_heartbeat(claim.trial_id)

    @_retried
    def should_prune(self, definition: StudyDefinition, claim: Claim, losses: Mapping[int, float]) -> bool:
        """Whether the trial is to be pruned, given its validation losses by epoch up to now.

        Raises TrialReassigned if the trial is no longer ours.
        """
        if definition.prune is None:
            return False
        pruner = make_pruner(definition.prune, definition.base[claim.gate].training.epochs)
        attempts = self._attempts(claim.gate)
        decision = decide(pruner, f"{self.name}/{claim.gate}", attempts, claim.index, losses)
        try:
            for name, value in decision.attributes.items():
                self.storage.optuna.set_trial_system_attr(claim.trial_id, name, value)
        except UpdateFinishedTrialError as error:
            raise TrialReassigned from error
        return decision.is_pruned

    @_retried
    def finish(self, claim: Claim, result: ResultRecord) -> None:
        """Store the result of a run, or why it failed or was pruned; the trial is not run again."""
        if result.status == "failed":
            self._end(claim, TrialState.FAIL, reason=result.reason)
            return
        kept = kept_result(result)
        if result.status == "pruned":
            # Not as ``reason``, which tells of a failure, also where a worker is killed before the next line.
            self._end(claim, TrialState.PRUNED, pruned=result.reason, result=kept)
        else:
            self._end(claim, TrialState.COMPLETE, [result.validation_loss], result=kept)

    def release(self, claim: Claim) -> None:
        """Give the trial back, so that it is queued again; does not count as a lost worker."""
        self._end(claim, TrialState.FAIL, released=True)

    @_retried
    def mark_lost(self, claim: Claim) -> None:
        """Store that the worker of the trial is gone, so that it is queued again."""
        self._end(claim, TrialState.FAIL)

    def _end(
        self, claim: Claim, state: TrialState, values: list[Any] | None = None, **attributes: Any
    ) -> None:
        with suppress(
            UpdateFinishedTrialError
        ):  # the worker missed its heartbeats, and another one was faster
            for name, value in attributes.items():
                self.storage.optuna.set_trial_user_attr(claim.trial_id, name, value)
            self.storage.optuna.set_trial_state_values(claim.trial_id, state, values)

    @_retried
    def records(self, definition: StudyDefinition) -> list[TrialRecord]:
        """One record per planned trial, sorted by gate and index."""
        records = []
        for gate in definition.gates:
            attempts = self._attempts(gate)
            records += [
                self._record(definition, gate, index, attempts.get(index, []))
                for index in range(definition.trials)
            ]
        return records

    def _record(
        self, definition: StudyDefinition, gate: str, index: int, attempts: list[FrozenTrial]
    ) -> TrialRecord:
        """The record of a trial, the same object each time once it is finished."""
        known = self._finished.get((gate, index))
        if known is not None:
            return known
        record = record_of(definition, gate, index, attempts)
        if record.is_finished:
            self._finished[gate, index] = record
        return record

    def _attempts(self, gate: str) -> dict[int, list[FrozenTrial]]:
        """The attempts at each trial, by its index, oldest first."""
        by_index: dict[int, list[FrozenTrial]] = {}
        for attempt in self._reader(gate).read():
            if "index" in attempt.user_attrs:  # else it was added by hand, in a dashboard for instance
                by_index.setdefault(attempt.user_attrs["index"], []).append(attempt)
        return by_index

    def _reader(self, gate: str) -> AttemptReader:
        if gate not in self._readers:
            self._readers[gate] = AttemptReader(self.storage.optuna, self._study_id(gate))
        return self._readers[gate]

    def _add(self, gate: str, trial: FrozenTrial) -> None:
        # Not by Study.add_trial, which keeps the trial in Optuna's cache.
        self.storage.optuna.create_new_trial(self._study_id(gate), trial)

    def _study(self, gate: str) -> optuna.Study:
        if gate not in self._studies:
            self._studies[gate] = optuna.load_study(
                storage=self.storage.optuna,
                study_name=f"{self.name}/{gate}",
                sampler=optuna.samplers.RandomSampler(),
            )
        return self._studies[gate]

    def _study_id(self, gate: str) -> int:
        return self.storage.optuna.get_study_id_from_name(f"{self.name}/{gate}")

    def _trial_id(self, gate: str, number: int) -> int:
        return self.storage.optuna.get_trial_id_from_study_id_trial_number(self._study_id(gate), number)


def count_by_status(trials: Iterable[TrialRecord], gate: str) -> Counter[TrialStatus]:
    """How many trials of ``gate`` have each status."""
    return Counter(trial.status for trial in trials if trial.gate == gate)


def best_trial(trials: Iterable[TrialRecord], gate: str) -> TrialRecord | None:
    """The complete trial of ``gate`` with the lowest validation loss; None if none is complete."""
    complete = [trial for trial in trials if trial.gate == gate and trial.status == "complete"]
    return min(complete, key=lambda trial: (_loss_or_inf(trial), trial.index), default=None)


def _loss_or_inf(trial: TrialRecord) -> float:
    return math.inf if trial.validation_loss is None else trial.validation_loss
