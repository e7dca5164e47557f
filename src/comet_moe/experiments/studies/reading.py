"""From folders to studies: the folder of a study, of a run, or one that contains runs.

Files are validated as they are read; an error is one sentence with the file, the line and the field. A
``Study`` is a table of trials, from which tables, curves and the report are computed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path
from typing import Any, Literal, TypeVar

import pandas as pd
import yaml
from pydantic import AliasChoices, AliasPath, BaseModel, Field, PositiveInt

from comet_moe import files
from comet_moe.exceptions import StudyError
from comet_moe.experiments.config import values
from comet_moe.experiments.studies.networks import network_name
from comet_moe.experiments.studies.records import (
    FINISHED,
    ROUTING_COLUMNS,
    StudyRecord,
    TrialRecord,
    TrialStatus,
)
from comet_moe.experiments.training.records import ResultRecord
from comet_moe.files import inside
from comet_moe.gates.registry import gate_names

_WHAT_TO_GIVE = "give the folder of a study, of a run, or one that contains runs"

RecordType = TypeVar("RecordType", bound=BaseModel)


METRIC_COLUMNS = (
    "validation_loss",
    "test_loss",
    "experts_per_sample",
    "flops_per_sample",
    "routing_gain",
    "parameters",
    "epochs",
    "best_epoch",
    "seconds",
    *ROUTING_COLUMNS,
)
"""Columns of floats, NaN where a trial has no value."""

COLUMNS = (*TrialRecord.model_fields, *ROUTING_COLUMNS)


@dataclass(frozen=True, eq=False)
class Study:
    """The trials of some gates on one problem, with the fields of its `StudyRecord`.

    Args:
        path: the folder of the study; for plain runs the folder that holds them.
        name: name of the study; for plain runs that of the recipe.
        kind: as in the record, or "runs": plain run folders that were collected.
        gates: names of the gates in the order of the study; for plain runs as in the paper's tables.
        trials_per_gate: the planned number; for plain runs the most that a gate has.
        experts: number of experts of the mixture; None where plain runs differ in it.
        trials: one row per trial with the columns ``COLUMNS``. Those of ``METRIC_COLUMNS`` are floats, NaN
            where there is no value; losses are times 100. ``status`` is "complete", "failed", "pruned",
            "running" or "waiting", and a complete trial has finite losses. ``run`` is the absolute path of
            the run's folder, None if it is not on this machine. ``params``, ``tasks`` and ``routing`` (a
            `TrialRouting` per gate of the model) are dictionaries.
    """

    path: Path
    name: str
    kind: Literal["tuning", "ablation", "runs"]
    recipe: str
    gates: list[str]
    trials_per_gate: int
    experts: int | None
    alpha: float | None
    settings: list[str]
    space: dict[str, dict[str, Any]]
    trials: pd.DataFrame

    @property
    def title(self) -> str:
        """Name and weight of the first task, as a heading."""
        return self.name if self.alpha is None else f"{self.name} (alpha={self.alpha:g})"

    @property
    def gates_with_results(self) -> list[str]:
        """The gates that have a complete trial."""
        complete = set(self.trials.loc[self.trials["status"] == "complete", "gate"])
        return [gate for gate in self.gates if gate in complete]

    def trials_of(self, gate: str) -> pd.DataFrame:
        """The trials of ``gate``."""
        return self.trials[self.trials["gate"] == gate]

    def planned_trials(self, gate: str) -> int:
        """How many trials of ``gate`` the study has when it is finished."""
        return len(self.trials_of(gate)) if self.kind == "runs" else self.trials_per_gate

    @property
    def num_unfinished(self) -> int:
        """Planned trials that are neither complete nor failed nor pruned."""
        return self._num_planned() - int(self.trials["status"].isin(FINISHED).sum())

    def left_out(self) -> list[str]:
        """A sentence about the unfinished trials and one about the pruned ones, as far as there are any."""
        pruned, planned = count_status(self.trials, "pruned"), self._num_planned()
        messages = []
        if self.num_unfinished:
            messages.append(
                f"{self.title}: {self.num_unfinished} of {planned} trials are unfinished and not included"
            )
        if pruned:
            messages.append(
                f"{self.title}: {pruned} of {planned} trials were pruned and are not included; as these are "
                "poor ones, curves by number of trials are lower than without --prune"
            )
        return messages

    def _num_planned(self) -> int:
        return sum(self.planned_trials(gate) for gate in self.gates)


class _RunSettings(BaseModel):
    """The part of a run's ``config.yaml`` that tells which runs are compared with each other."""

    recipe: str
    seed: int
    stage: str = "train"
    gate: str = Field(validation_alias=AliasPath("gate", "name"))
    experts: PositiveInt | None = Field(
        default=None,
        validation_alias=AliasChoices(AliasPath("model", "experts"), AliasPath("experts", "count")),
    )
    alpha: float | None = Field(default=None, validation_alias=AliasPath("loss", "alpha"))
    mixture: str = Field(default="", validation_alias=AliasPath("model", "mixture"))

    @property
    def gate_name(self) -> str:
        """The network that was trained; "dense" for the teacher of a BERT, which has no gate."""
        return "dense" if self.stage == "finetune" else network_name(self.gate, self.mixture)


def read_studies(paths: Sequence[Path]) -> list[Study]:
    """The studies in ``paths``, in their order, then plain runs, grouped by recipe and task weight.

    A path with study.json is a study. A path with config.yaml is a run, any other one a folder of runs; a run
    without result.json counts as running. A path that is given twice counts once.
    """
    unique = list(dict.fromkeys(path.resolve() for path in paths))
    folders = [path for path in unique if (path / "study.json").is_file()]
    runs = [run for path in unique if path not in folders for run in _find_runs(path)]
    return [*map(_read_study, folders), *_group_runs(dict.fromkeys(runs))]


def read_json(path: Path, kind: type[RecordType]) -> RecordType:
    """A file with one JSON object."""
    return files.read_json(path, kind, StudyError)


def read_yaml(path: Path, kind: type[RecordType]) -> RecordType:
    """A file with one YAML mapping."""
    try:
        content = values.read_yaml(files.read_text(path, StudyError))
    except yaml.YAMLError as error:
        raise StudyError(f"{path} is not YAML ({files.describe(error)}): restore the file") from error
    return files.validate(content, str(path), kind, StudyError, "restore the file")


def read_lines(path: Path, kind: type[RecordType]) -> list[RecordType]:
    """A file with one JSON object per line."""
    return files.read_json_lines(path, kind, StudyError)


def _read_study(path: Path) -> Study:
    record = read_json(path / "study.json", StudyRecord)
    if not (path / "trials.jsonl").is_file():
        raise StudyError(f"{path} has no trials.jsonl: the study has not started, resume it with --resume")
    return Study(
        path=path,
        trials_per_gate=record.trials,
        trials=to_frame(trial.row(_existing_run(path, trial.run)) for trial in read_trials(path, record)),
        **record.model_dump(include={field.name for field in fields(Study)} - {"trials"}),
    )


def read_trials(path: Path, study: StudyRecord) -> list[TrialRecord]:
    """The trials of the study in the folder ``path``, each of which ``study`` has planned."""
    trials = read_lines(path / "trials.jsonl", TrialRecord)
    seen: set[tuple[str, int]] = set()
    for number, trial in enumerate(trials, start=1):
        source, key = f"line {number} of {path / 'trials.jsonl'}", (trial.gate, trial.index)
        if trial.gate not in study.gates:
            raise StudyError(
                f"{source} has gate {trial.gate!r}, which is not in study.json: restore the file"
            )
        if trial.index >= study.trials:
            raise StudyError(
                f"{source} has index {trial.index}, and study.json has {study.trials} trials per gate, "
                "counted from 0: restore the file"
            )
        if key in seen:
            raise StudyError(f"{source} repeats trial {trial.index} of {trial.gate}: restore the file")
        seen.add(key)
    return trials


def _existing_run(study: Path, run: str | None) -> Path | None:
    folder = None if run is None else inside(study, run)
    return folder if folder is not None and folder.is_dir() else None


def _find_runs(path: Path) -> list[Path]:
    if not path.is_dir():
        raise StudyError(f"{path} is not a folder: {_WHAT_TO_GIVE}")
    if (path / "config.yaml").is_file():
        return [path]
    runs = sorted(file.parent for file in path.glob("*/config.yaml"))
    if not runs:
        raise StudyError(f"{path} has neither a study (study.json) nor runs (config.yaml): {_WHAT_TO_GIVE}")
    return runs


def _group_runs(runs: Iterable[Path]) -> list[Study]:
    groups: dict[tuple[str, float | None], list[tuple[Path, _RunSettings]]] = {}
    for run in runs:
        settings = read_yaml(run / "config.yaml", _RunSettings)
        groups.setdefault((settings.recipe, settings.alpha), []).append((run, settings))
    return [_study_of_runs(recipe, alpha, group) for (recipe, alpha), group in groups.items()]


def _study_of_runs(recipe: str, alpha: float | None, runs: list[tuple[Path, _RunSettings]]) -> Study:
    by_gate: dict[str, list[dict[str, Any]]] = {}
    for run, settings in sorted(runs, key=lambda pair: (pair[1].seed, pair[0])):
        rows = by_gate.setdefault(settings.gate_name, [])
        rows.append(_read_run(run, settings, index=len(rows)).row(run))
    names = gate_names()
    gates = sorted(by_gate, key=lambda gate: (names.index(gate) if gate in names else len(names), gate))
    experts = {settings.experts for _, settings in runs if settings.gate_name != "dense"}
    return Study(
        path=runs[0][0].parent,
        name=recipe,
        kind="runs",
        recipe=recipe,
        gates=gates,
        trials_per_gate=max(map(len, by_gate.values())),
        experts=experts.pop() if len(experts) == 1 else None,
        alpha=alpha,
        settings=[],
        space={gate: {} for gate in gates},
        trials=to_frame(row for gate in gates for row in by_gate[gate]),
    )


def _read_run(run: Path, settings: _RunSettings, index: int) -> TrialRecord:
    is_finished = (run / "result.json").is_file()
    result = read_json(run / "result.json", ResultRecord) if is_finished else ResultRecord(status="running")
    return TrialRecord.of_run(settings.gate_name, index, result, params={"seed": settings.seed})


def to_frame(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Trials as a data frame with the columns and types that ``Study.trials`` has."""
    values = [[row[name] for name in COLUMNS] for row in rows]
    frame = pd.DataFrame(values, columns=list(COLUMNS), dtype=object)  # else a None among texts becomes NaN
    return frame.astype(dict.fromkeys(METRIC_COLUMNS, float) | dict.fromkeys(("index", "attempts"), int))


def rank_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """The complete trials sorted by validation loss, the lowest first; ties are sorted by index."""
    return trials[trials["status"] == "complete"].sort_values(["validation_loss", "index"])


def count_status(trials: pd.DataFrame, status: TrialStatus) -> int:
    """The number of trials with this status."""
    return int((trials["status"] == status).sum())


def select_trials(study: Study, gate: str, top_percent: float) -> pd.DataFrame:
    """The trials of ``gate`` that its row in the table is computed from, the lowest validation loss first.

    In a tuning study the best ceil(``top_percent`` % of the planned trials), as far as they are complete. In
    an ablation and among plain runs, where nothing was selected, all complete ones. Of a gate with seeds that
    converged within a budget, the other seeds are left out.
    """
    if not 0 < top_percent <= 100:
        raise StudyError(f"the top percentage must be above 0 and at most 100, got {top_percent:g}")
    ranked = rank_trials(study.trials_of(gate))
    if study.kind != "tuning":
        converged = ranked[ranked["converged"] == True]  # noqa: E712 - None is unknown
        return ranked if converged.empty or study.kind == "runs" else converged
    # Rounded first: 30 % of 10 is 3 and a rounding error, which ceil would make 4.
    return ranked.head(ceil(round(study.planned_trials(gate) * top_percent / 100, 9)))
