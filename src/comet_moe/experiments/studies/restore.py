"""The SQLite file of a study that is gone, made again from ``study.json`` and ``trials.jsonl``."""

import math
import os
import tempfile
from pathlib import Path
from typing import Any

from comet_moe.exceptions import StudyError
from comet_moe.experiments.studies.definition import StudyDefinition
from comet_moe.experiments.studies.folder import StudyFolder
from comet_moe.experiments.studies.queue import TrialQueue
from comet_moe.experiments.studies.reading import read_trials
from comet_moe.experiments.studies.records import StudyRecord, TrialRecord
from comet_moe.experiments.studies.storage import LOCK_TIMEOUT, Storage, sqlite_url
from comet_moe.files import LockTimeout, file_lock

ROUNDING = 1e-12
"""How much a sampled value may differ, relatively: two machines may round a logarithm differently."""


def restore_storage(folder: StudyFolder, record: StudyRecord, definition: StudyDefinition) -> None:
    """Write the SQLite file of ``folder`` with the finished trials of ``trials.jsonl``.

    The file is complete or not there, also if the process is killed. Of two processes one writes it.
    """
    finished = _read_finished(folder, record, definition)
    try:
        with file_lock(folder.path / ".restoring.lock", LOCK_TIMEOUT):
            if not folder.sqlite_file.exists():
                _write(folder, record.name, definition, finished)
    except LockTimeout as error:
        raise StudyError(f"{error} for {LOCK_TIMEOUT} s: resume with --resume") from error


def _write(folder: StudyFolder, name: str, definition: StudyDefinition, finished: list[TrialRecord]) -> None:
    with tempfile.TemporaryDirectory(prefix=".restoring-", dir=folder.path) as place:
        file = Path(place, folder.sqlite_file.name)
        queue = TrialQueue(Storage(sqlite_url(file)), name)
        queue.create(definition)
        queue.add_finished(definition, finished)
        queue.storage.close()
        os.replace(file, folder.sqlite_file)


def _read_finished(
    folder: StudyFolder, record: StudyRecord, definition: StudyDefinition
) -> list[TrialRecord]:
    """The finished trials; raises StudyError if they are not those of ``definition``."""
    if not folder.trials_file.exists():  # the study was stopped before its first trial
        return []
    finished = [trial for trial in read_trials(folder.path, record) if trial.is_finished]
    for trial in finished:
        name = f"trial {trial.index} of {trial.gate} in {folder.trials_file}"
        planned = definition.params(trial.gate, trial.index)
        if not _are_equal(trial.params, planned):
            raise StudyError(
                f"{name} has {trial.params}, and the study plans {planned}: choose another --out"
            )
        loss = trial.validation_loss
        if trial.status == "complete" and (loss is None or not math.isfinite(loss)):
            raise StudyError(f"{name} is complete, but its validation_loss is {loss}: restore the file")
    return finished


def _are_equal(params: dict[str, Any], planned: dict[str, Any]) -> bool:
    """Whether a trial has the planned values, but for rounding."""
    return params.keys() == planned.keys() and all(
        math.isclose(params[key], value, rel_tol=ROUNDING)
        if isinstance(value, float) and isinstance(params[key], float)
        else params[key] == value
        for key, value in planned.items()
    )
