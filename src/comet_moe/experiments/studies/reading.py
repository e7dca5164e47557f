"""From folders to studies: the folder of a study, of a run, or one that contains runs.

Files are validated as they are read; an error is one sentence with the file, the line and the field.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import AliasChoices, AliasPath, BaseModel, Field, PositiveInt

from comet_moe import files
from comet_moe.exceptions import StudyError
from comet_moe.experiments.config import yaml_text
from comet_moe.experiments.studies.records import RESULT_FIELDS, StudyRecord, TrialRecord, trial_routing
from comet_moe.experiments.studies.results import Study, to_frame
from comet_moe.experiments.training.records import ResultRecord
from comet_moe.files import inside
from comet_moe.gate_names import GATE_NAMES

_WHAT_TO_GIVE = "give the folder of a study, of a run, or one that contains runs"

RecordType = TypeVar("RecordType", bound=BaseModel)


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

    @property
    def gate_name(self) -> str:
        """The gate that was trained; "dense" for the teacher of a BERT, which has none."""
        return "dense" if self.stage == "finetune" else self.gate


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
        content = yaml_text.read_yaml(files.read_text(path, StudyError))
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
        name=record.name,
        kind=record.kind,
        recipe=record.recipe,
        gates=record.gates,
        trials_per_gate=record.trials,
        experts=record.experts,
        alpha=record.alpha,
        settings=record.settings,
        space=record.space,
        trials=to_frame(trial.row(_existing_run(path, trial.run)) for trial in read_trials(path, record)),
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
    gates = sorted(by_gate, key=_gate_rank)
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


def _gate_rank(gate: str) -> tuple[int, str]:
    return (GATE_NAMES.index(gate) if gate in GATE_NAMES else len(GATE_NAMES), gate)


def _read_run(run: Path, settings: _RunSettings, index: int) -> TrialRecord:
    is_finished = (run / "result.json").is_file()
    result = read_json(run / "result.json", ResultRecord) if is_finished else ResultRecord(status="running")
    return TrialRecord(
        gate=settings.gate_name,
        index=index,
        params={"seed": settings.seed},
        routing=trial_routing(result),
        **result.model_dump(include=set(RESULT_FIELDS)),
    )
