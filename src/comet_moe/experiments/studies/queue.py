"""The trials of a study in its storage, claimed one by one by workers on any machine.

Each gate has an Optuna study, STUDY/GATE, which `optuna-dashboard` opens. A worker claims the next trial:
under a lock it enqueues an attempt at it and asks Optuna for it. A trial is finished once an attempt is
complete, was pruned, or has failed with a reason. An attempt that ended otherwise (its worker was killed, or
asked to stop) has no reason, and the trial is claimed again.
"""

import functools
import logging
import math
import os
import socket
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Concatenate, ParamSpec, TypeVar

from comet_moe.exceptions import StudyError, needs_extra
from comet_moe.experiments.studies.attempts import (
    decide_pruning,
    finished_attempt,
    kept_result,
    optuna_space,
    record_of,
    reopening,
    status_of,
)
from comet_moe.experiments.studies.definition import StudyDefinition, check_configurations, parse_definition
from comet_moe.experiments.studies.records import FINISHED, TrialRecord
from comet_moe.experiments.studies.storage import Storage
from comet_moe.experiments.training.records import ResultRecord

with needs_extra("tune", "tuning"):
    import optuna
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import FrozenTrial, TrialState

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Claim:
    """A trial that a worker has claimed; ``number`` and ``trial_id`` are Optuna's of the attempt."""

    gate: str
    index: int
    number: int
    trial_id: int


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
        optuna.logging.set_verbosity(logging.ERROR)
        self.storage = storage
        self.name = name
        self._studies: dict[str, optuna.Study] = {}
        self._asked: dict[Claim, optuna.Trial] = {}
        self._finished: dict[tuple[str, int], TrialRecord] = {}

    @_retried
    def find_definition(self) -> StudyDefinition | None:
        """The definition of the study; None if the storage has no study of this name."""
        for name in optuna.get_all_study_names(self.storage.optuna):
            if name.startswith(f"{self.name}/"):
                study = self._study(name.removeprefix(f"{self.name}/"))
                text = study.user_attrs.get("definition")
                if text is not None:
                    return parse_definition(text, f"study {self.name}")
                if any("index" not in trial.user_attrs for trial in study.get_trials(deepcopy=False)):
                    raise StudyError(
                        f"the storage has a study {name} that comet-moe did not write: choose another --name"
                    )
        return None

    def definition(self) -> StudyDefinition:
        """The definition of the study; raises StudyError if it is gone."""
        definition = self.find_definition()
        if definition is None:
            raise StudyError(f"the storage has no study {self.name} any more: resume with --resume")
        return definition

    @_retried
    def create(self, definition: StudyDefinition, finished: Iterable[TrialRecord] = ()) -> StudyDefinition:
        """Write the study, unless another machine has; returns the definition that is in the storage.

        An existing definition is written again, as its writer may have been killed between two gates. A study
        that the storage has lost gets its ``finished`` trials.
        """
        with self.storage.lock(self.name):
            saved = self.find_definition()
            # Before the definition: after a kill, the next process adds the rest.
            for record in finished if saved is None else ():
                study = self._create_study(record.gate)
                if status_of(self._attempts(record.gate)[record.index]) not in FINISHED:
                    study.add_trial(finished_attempt(definition, record))
            self._write(saved or definition)
            return saved or definition

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
        studies = [self._create_study(gate) for gate in definition.gates]
        text = definition.model_dump_json()
        for study in studies:
            study.set_user_attr("definition", text)

    @_retried
    def claim(self, definition: StudyDefinition, gates: Sequence[str] = ()) -> Claim | None:
        """Claim the waiting trial of lowest index, of ``gates`` or all in turn; None if none is waiting."""
        with self.storage.lock(self.name), _without_optuna_warnings():
            waiting = []
            for position, gate in enumerate(gates or definition.gates):
                self._fail_lost_attempts(gate)
                attempts = self._attempts(gate)
                indices = (i for i in range(definition.trials) if status_of(attempts[i]) == "waiting")
                waiting += [(index, position, gate) for index in islice(indices, 1)]
            if not waiting:
                return None
            index, _, gate = min(waiting)
            with suppress(UpdateFinishedTrialError):  # the lock was lost with the network
                return self._start(definition, gate, index)
        return None

    def _fail_lost_attempts(self, gate: str) -> None:
        """Fail attempts whose heartbeat stopped, and those whose worker was killed before the first one."""
        study = self._study(gate)
        optuna.storages.fail_stale_trials(study)
        for attempt in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if "worker" not in attempt.user_attrs:
                study.tell(attempt.number, state=TrialState.FAIL, skip_if_finished=True)

    def _start(self, definition: StudyDefinition, gate: str, index: int) -> Claim:
        study, space = self._study(gate), optuna_space(definition.space[gate])
        study.enqueue_trial(definition.sampled_values(gate, index), user_attrs={"index": index})
        while (trial := study.ask(space)).user_attrs.get("index") != index:
            # It was enqueued by hand, in a dashboard for instance, or by a worker that was killed here.
            study.tell(trial, state=TrialState.FAIL)
        study_id = self.storage.optuna.get_study_id_from_name(study.study_name)
        trial_id = self.storage.optuna.get_trial_id_from_study_id_trial_number(study_id, trial.number)
        claim = Claim(gate, index, trial.number, trial_id)
        self._asked[claim] = trial
        # The heartbeat first: Optuna never treats a running trial without one as stale.
        self.storage.optuna.record_heartbeat(trial_id)
        trial.set_user_attr("worker", f"{socket.gethostname()}:{os.getpid()}")
        return claim

    @_retried
    def count_unfinished(self, definition: StudyDefinition, gates: Sequence[str] = ()) -> int:
        """Trials of ``gates`` that are waiting or running; of all gates if none is given."""
        by_gate = map(self._attempts, gates or definition.gates)
        return sum(
            status_of(attempts[index]) not in FINISHED
            for attempts in by_gate
            for index in range(definition.trials)
        )

    @_retried
    def report(self, claim: Claim, epoch: int, validation_loss: float | None) -> None:
        """Store the validation loss of an epoch.

        Raises UpdateFinishedTrialError if the worker missed its heartbeats: the trial is no longer ours.
        """
        self._asked[claim].report(math.nan if validation_loss is None else validation_loss, epoch)

    def send_heartbeat(self, claim: Claim) -> None:
        """Record that the worker of the trial is alive."""
        with self.storage.one_call:
            self.storage.optuna.record_heartbeat(claim.trial_id)

    @_retried
    def should_prune(self, definition: StudyDefinition, claim: Claim, losses: Mapping[int, float]) -> bool:
        """Whether the trial is to be pruned, given its validation losses by epoch up to now.

        Raises UpdateFinishedTrialError as `report` does.
        """
        if definition.prune is None:
            return False
        epochs = definition.base[claim.gate].training.epochs
        study_name, attempts = self._study(claim.gate).study_name, self._attempts(claim.gate)
        is_pruned, rungs = decide_pruning(definition.prune, epochs, study_name, attempts, claim.index, losses)
        if rungs:
            self._asked[claim].set_user_attr("rungs", rungs)
        return is_pruned

    @_retried
    def finish(self, claim: Claim, result: ResultRecord) -> None:
        """Store the result of a run, or why it failed or was pruned; the trial is not run again."""
        kept = kept_result(TrialRecord.of_run(claim.gate, claim.index, result))
        if result.status == "failed":
            self._end(claim, TrialState.FAIL, reason=result.reason)
        elif result.status == "pruned":
            # Not as ``reason``, which tells of a failure, also where a worker is killed before the next line.
            self._end(claim, TrialState.PRUNED, pruned=result.reason, result=kept)
        else:
            loss = math.inf if result.validation_loss is None else result.validation_loss
            self._end(claim, TrialState.COMPLETE, loss, result=kept)
        del self._asked[claim]

    @_retried
    def reopen(self, gate: str, index: int) -> None:
        """Run a finished trial again: its run has a checkpoint to resume from."""
        with self.storage.lock(self.name):
            self._study(gate).add_trial(reopening(index))
        self._finished.pop((gate, index), None)

    def release(self, claim: Claim) -> None:
        """Give the trial back, so that it is claimed again; does not count as a lost worker."""
        self._end(claim, TrialState.FAIL, released=True)
        del self._asked[claim]

    def release_all(self) -> None:
        """Give back what this process has claimed and not finished."""
        for claim in list(self._asked):
            self.release(claim)

    @_retried
    def mark_lost(self, claim: Claim) -> None:
        """Store that the worker of the trial is gone, so that it is claimed again."""
        self._end(claim, TrialState.FAIL)

    def _end(self, claim: Claim, state: TrialState, value: float | None = None, **attributes: Any) -> None:
        with suppress(UpdateFinishedTrialError):  # the worker missed its heartbeats, and another was faster
            for name, content in attributes.items():
                self._asked[claim].set_user_attr(name, content)
            self._study(claim.gate).tell(claim.number, value, state, skip_if_finished=True)

    @_retried
    def records(self, definition: StudyDefinition) -> list[TrialRecord]:
        """One record per planned trial, sorted by gate and index."""
        records = []
        for gate in definition.gates:
            attempts = self._attempts(gate)
            for index in range(definition.trials):
                record = self._finished.get((gate, index)) or record_of(
                    definition, gate, index, attempts[index]
                )
                if record.is_finished:
                    self._finished[gate, index] = record
                records.append(record)
        return records

    def _attempts(self, gate: str) -> defaultdict[int, list[FrozenTrial]]:
        """The attempts at each trial, by its index, oldest first."""
        by_index = defaultdict(list)
        for attempt in self._study(gate).get_trials(deepcopy=False):
            if "index" in attempt.user_attrs:  # else it was added by hand
                by_index[attempt.user_attrs["index"]].append(attempt)
        return by_index

    def _study(self, gate: str) -> optuna.Study:
        if gate not in self._studies:
            self._studies[gate] = optuna.load_study(
                study_name=f"{self.name}/{gate}",
                storage=self.storage.optuna,
                sampler=optuna.samplers.RandomSampler(),
            )
        return self._studies[gate]

    def _create_study(self, gate: str) -> optuna.Study:
        optuna.create_study(
            study_name=f"{self.name}/{gate}", storage=self.storage.optuna, load_if_exists=True
        )
        return self._study(gate)


@contextmanager
def _without_optuna_warnings() -> Iterator[None]:
    """Heartbeats outside of ``Study.optimize`` warn, and so does what Optuna calls experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", "Heartbeat of storage", UserWarning)
        yield
