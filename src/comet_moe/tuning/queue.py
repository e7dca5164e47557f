"""The trials of a study in a storage: drawn first, then claimed one by one by workers on any machine.

Each gate has an Optuna study, STUDY/GATE, that `optuna-dashboard` opens. A trial is known by its index, and
is done once one of its attempts is complete, or has failed for a reason of its own. An attempt that ends in
any other way (its worker was killed, or was asked to stop) has no reason, and the trial is queued again.
"""

import logging
import os
import socket
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from comet_moe.analysis.study import METRIC_COLUMNS
from comet_moe.config import Choice, Distribution, LogUniform
from comet_moe.exceptions import StudyError
from comet_moe.tuning.storage import Storage
from comet_moe.tuning.study import Definition, check_configurations, parse_definition

ATTEMPTS = 5
"""Workers that a trial may lose, without getting an epoch further, before it counts as failed."""

AHEAD = 20
"""Trials of a gate that wait in the storage at a time: they are read at each claim, and slow to write."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """A trial that a worker has taken on."""

    gate: str
    index: int
    trial_id: int


class Lost(Exception):
    """The trial is no longer this worker's: it was thought dead, and another one has the trial."""


def run_name(gate: str, index: int) -> str:
    """The folder of a trial's run, below the study's."""
    return f"runs/{gate}-{index:03}"


class Queue:
    """The trials of the study ``name`` in ``storage``."""

    def __init__(self, storage: Storage, name: str):
        if "/" in name:
            raise StudyError(f"the name of a study must not hold a slash, got {name!r}")
        optuna.logging.set_verbosity(logging.WARNING)
        self.storage = storage
        self.name = name
        self._studies: dict[str, optuna.Study] = {}

    def definition(self) -> Definition | None:
        """What the study is, or None if the storage has none of this name."""
        for name in optuna.get_all_study_names(self.storage.tables):
            if name.startswith(f"{self.name}/"):
                study = self._study(name.removeprefix(f"{self.name}/"))
                text = study.user_attrs.get("definition")
                if text is not None:
                    return parse_definition(text, f"study {self.name}")
                if study.get_trials(deepcopy=False):
                    raise StudyError(f"the storage has a study {name} that is not ours: name another")
        return None

    def known_definition(self) -> Definition:
        """What the study is; that it is gone is an error."""
        found = self.definition()
        if found is None:
            raise StudyError(f"the storage has no study {self.name} any more: restore it")
        return found

    def start(self, definition: Definition) -> Definition:
        """Write the study, or find that another machine did; what it is, then.

        What is found is written once more: whoever began may have been killed between two gates.
        """
        with self.storage.locked(self.name):
            found = self.definition() or definition
            self._write(found)
            return found

    def add(self, count: int) -> Definition:
        """Ask for ``count`` more trials a gate."""
        with self.storage.locked(self.name):
            found = self.known_definition()
            definition = found.model_copy(update={"trials": found.trials + count})
            check_configurations(definition, found.trials)
            self._write(definition)
            return definition

    def _write(self, definition: Definition) -> None:
        text = definition.model_dump_json()
        for gate in definition.gates:
            study = optuna.create_study(
                storage=self.storage.tables, study_name=f"{self.name}/{gate}", load_if_exists=True
            )
            study.set_user_attr("definition", text)

    def fill(self, definition: Definition) -> int:
        """Queue the next trials of each gate, those without a sign of life too; how many are not done."""
        unfinished = 0
        with self.storage.locked(self.name), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            for gate in definition.gates:
                study = self._study(gate)
                optuna.storages.fail_stale_trials(study)
                states = {index: _state(attempts) for index, attempts in _attempts(study)}
                due = [i for i in range(definition.trials) if states.get(i, "due") == "due"]
                waiting = sum(state == "waiting" for state in states.values())
                for index in due[: max(AHEAD - waiting, 0)]:
                    study.add_trial(_waiting(definition, gate, index))
                unfinished += sum(states.get(i) != "done" for i in range(definition.trials))
        return unfinished

    def claim(self, definition: Definition) -> Claim | None:
        """Take on the waiting trial of lowest index, gate by gate; None if none waits."""
        tables = self.storage.tables
        with self.storage.locked(self.name):
            waiting = [
                (trial.user_attrs["index"], place, trial.number)
                for place, gate in enumerate(definition.gates)
                for trial in self._study(gate).get_trials(deepcopy=False, states=(TrialState.WAITING,))
                if "index" in trial.user_attrs
            ]
            if not waiting:
                return None
            index, place, number = min(waiting)
            gate = definition.gates[place]
            trial_id = self._trial_id(gate, number)
            # First a sign of life: a trial that runs without one is never seen as stale.
            tables.record_heartbeat(trial_id)
            tables.set_trial_user_attr(trial_id, "worker", f"{socket.gethostname()}:{os.getpid()}")
            taken = tables.set_trial_state_values(trial_id, TrialState.RUNNING)
        return Claim(gate, index, trial_id) if taken else None

    def report(self, claim: Claim, epoch: int, loss: float) -> None:
        """Note an epoch's validation loss."""
        try:
            self.storage.tables.set_trial_intermediate_value(claim.trial_id, epoch, loss)
        except UpdateFinishedTrialError as error:
            raise Lost from error

    def beat(self, claim: Claim) -> None:
        """Give a sign of life."""
        self.storage.tables.record_heartbeat(claim.trial_id)

    def finish(self, claim: Claim, result: dict[str, Any]) -> None:
        """Keep what a run came to: its figures, or the reason why there are none."""
        if result["status"] == "failed":
            self.fail(claim, result["reason"])
            return
        kept = {name: result[name] for name in (*METRIC_COLUMNS, "tasks")}
        with suppress(UpdateFinishedTrialError):  # its worker was thought dead, and another one ran it
            self.storage.tables.set_trial_user_attr(claim.trial_id, "result", kept)
            self.storage.tables.set_trial_state_values(
                claim.trial_id, TrialState.COMPLETE, [result["validation_loss"]]
            )

    def fail(self, claim: Claim, reason: str) -> None:
        """Note that the trial has no result, and why; it is not run again."""
        with suppress(UpdateFinishedTrialError):
            self.storage.tables.set_trial_user_attr(claim.trial_id, "reason", reason)
            self.storage.tables.set_trial_state_values(claim.trial_id, TrialState.FAIL)

    def lose(self, claim: Claim) -> None:
        """Note that the trial's worker is gone; :meth:`fill` queues it again."""
        with suppress(UpdateFinishedTrialError):
            self.storage.tables.set_trial_state_values(claim.trial_id, TrialState.FAIL)

    def hand_back(self, claim: Claim) -> None:
        """Leave the trial to others."""
        with suppress(UpdateFinishedTrialError):
            self.storage.tables.set_trial_user_attr(claim.trial_id, "handed_back", True)
            self.storage.tables.set_trial_state_values(claim.trial_id, TrialState.FAIL)

    def rows(self, definition: Definition) -> list[Row]:
        """One row for each trial that was asked for, by gate and index."""
        rows = []
        for gate in definition.gates:
            found = dict(_attempts(self._study(gate)))
            rows += [
                _row(definition, gate, index, found.get(index, [])) for index in range(definition.trials)
            ]
        return rows

    def _study(self, gate: str) -> optuna.Study:
        if gate not in self._studies:
            self._studies[gate] = optuna.load_study(
                storage=self.storage.tables,
                study_name=f"{self.name}/{gate}",
                sampler=optuna.samplers.RandomSampler(),
            )
        return self._studies[gate]

    def _trial_id(self, gate: str, number: int) -> int:
        study_id = self.storage.tables.get_study_id_from_name(f"{self.name}/{gate}")
        return self.storage.tables.get_trial_id_from_study_id_trial_number(study_id, number)


def counts(rows: list[Row], gate: str) -> Counter[str]:
    """How many trials of ``gate`` are complete, failed, running and waiting."""
    return Counter(row["status"] for row in rows if row["gate"] == gate)


def best(rows: list[Row], gate: str) -> Row | None:
    """The complete trial of ``gate`` with the lowest validation loss."""
    complete = [row for row in rows if row["gate"] == gate and row["status"] == "complete"]
    return min(complete, key=lambda row: (row["validation_loss"], row["index"]), default=None)


def _attempts(study: optuna.Study) -> Iterator[tuple[int, list[FrozenTrial]]]:
    """The attempts at each index, in order."""
    by_index: dict[int, list[FrozenTrial]] = {}
    for trial in study.get_trials(deepcopy=False):
        if "index" in trial.user_attrs:  # else it was added by hand, in a dashboard for instance
            by_index.setdefault(trial.user_attrs["index"], []).append(trial)
    yield from by_index.items()


def _state(attempts: list[FrozenTrial]) -> Literal["done", "running", "waiting", "due"]:
    """How a trial stands; "due" if it has to be queued again."""
    states = {trial.state for trial in attempts}
    failed = any("reason" in trial.user_attrs for trial in attempts) or _is_given_up(attempts)
    if TrialState.COMPLETE in states or failed:
        return "done"
    if TrialState.RUNNING in states:
        return "running"
    return "waiting" if TrialState.WAITING in states else "due"


def _is_given_up(attempts: list[FrozenTrial]) -> bool:
    """Whether too many workers were lost without an epoch more; with one, the next goes on from there."""
    lost = [t for t in attempts if t.state == TrialState.FAIL and "handed_back" not in t.user_attrs]
    return sum(not t.intermediate_values for t in lost) >= ATTEMPTS


def _waiting(definition: Definition, gate: str, index: int) -> FrozenTrial:
    return optuna.create_trial(
        state=TrialState.WAITING,
        params=definition.values(gate, index),
        distributions={key: _distribution(draw) for key, draw in definition.space[gate].items()},
        user_attrs={"index": index},
    )


def _distribution(draw: Distribution) -> BaseDistribution:
    if isinstance(draw, Choice):
        return CategoricalDistribution(draw.choice)
    if isinstance(draw, LogUniform):
        return FloatDistribution(*draw.log, log=True)
    return FloatDistribution(*draw.uniform)


def _row(definition: Definition, gate: str, index: int, attempts: list[FrozenTrial]) -> Row:
    status, reason, result, worker = "waiting", None, {}, None
    for trial in attempts:
        if trial.state == TrialState.COMPLETE:
            status, result = "complete", trial.user_attrs["result"]
        elif "reason" in trial.user_attrs:
            status, reason = "failed", trial.user_attrs["reason"]
        elif trial.state == TrialState.RUNNING:
            status = "running"
        worker = trial.user_attrs.get("worker", worker)
        if status in ("complete", "failed"):
            break
    if status == "waiting" and _is_given_up(attempts):
        status, reason = "failed", f"its worker was lost {ATTEMPTS} times"
    return {
        "gate": gate,
        "index": index,
        "status": status,
        "reason": reason,
        "attempts": sum(trial.state != TrialState.WAITING for trial in attempts),
        "worker": worker,
        "run": run_name(gate, index),
        "params": {**definition.values(gate, index), "seed": definition.base[gate].seed + index},
        **{name: result.get(name) for name in METRIC_COLUMNS},
        "tasks": result.get("tasks", {}),
    }
