"""Files of a study or a run, checked as they are read: what is missing or wrong is named in one sentence.

From folders to studies: the folder of a study, a run's folder, or a folder that holds runs.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, NonNegativeInt, PositiveInt, ValidationError

from comet_moe.analysis.study import Study, to_frame
from comet_moe.exceptions import StudyError

GATE_ORDER = (
    "softmax",
    "softmax+",
    "hash",
    "hash+",
    "topk",
    "topk+",
    "dselect",
    "dselect+",
    "comet",
    "comet+",
)
"""The order of the paper's tables."""

Record = TypeVar("Record", bound=BaseModel)


class StudyRecord(BaseModel):
    """``study.json``."""

    kind: Literal["tuning", "ablation"]
    name: str
    recipe: str
    gates: list[str]
    trials: PositiveInt
    experts: PositiveInt | None = None
    alpha: float | None = None
    settings: list[str] = []
    space: dict[str, dict[str, Any]] = {}


class ResultRecord(BaseModel):
    """What a run has come to: its ``result.json``."""

    status: Literal["complete", "failed", "running", "waiting"]
    reason: str | None = None
    validation_loss: float | None = None
    test_loss: float | None = None
    experts_per_sample: float | None = None
    flops_per_sample: float | None = None
    parameters: float | None = None
    epochs: float | None = None
    best_epoch: float | None = None
    seconds: float | None = None
    tasks: dict[str, dict[str, float | None]] = {}


class TrialRecord(ResultRecord):
    """A line of ``trials.jsonl``: a run's result, and which trial it is."""

    gate: str
    index: NonNegativeInt
    attempts: NonNegativeInt = 1
    run: str | None = None
    params: dict[str, Any] = {}

    def row(self, run: Path | None) -> dict[str, Any]:
        """The trial as a row of the table; one that has no finite losses counts as failed."""
        row = self.model_dump() | {"run": run}
        for name in ("validation_loss", "test_loss"):
            if self.status == "complete" and not _is_finite(row[name]):
                row |= {"status": "failed", "reason": f"{name} is {row[name]}"}
        if row["status"] != "complete":
            row |= {"validation_loss": None, "test_loss": None}
        return row


class _Name(BaseModel):
    name: str


class _Experts(BaseModel):
    experts: PositiveInt | None = None


class _Count(BaseModel):
    count: PositiveInt | None = None


class _Alpha(BaseModel):
    alpha: float | None = None


class RunRecord(BaseModel):
    """What of a run's ``config.yaml`` tells which runs belong together."""

    recipe: str
    stage: str = "train"
    gate: _Name
    seed: int
    model: _Experts = _Experts()
    experts: _Count = _Count()
    loss: _Alpha = _Alpha()

    @property
    def gate_name(self) -> str:
        """Of the gate that was trained; "dense" for a teacher of BERTs, which has none."""
        return "dense" if self.stage == "finetune" else self.gate.name

    @property
    def expert_count(self) -> int | None:
        """Experts of the mixture, or of each layer of a BERT."""
        return self.model.experts or self.experts.count


def read_json(path: Path, kind: type[Record]) -> Record:
    """One JSON object."""
    return _parse_json(_text(path), str(path), kind)


def read_yaml(path: Path, kind: type[Record]) -> Record:
    """One YAML mapping."""
    try:
        return _checked(yaml.safe_load(_text(path)), str(path), kind)
    except yaml.YAMLError as error:
        raise StudyError(f"{path} is not YAML ({_said(error)}): restore it") from error


def read_lines(path: Path, kind: type[Record]) -> list[Record]:
    """One JSON object a line."""
    return [
        _parse_json(line, f"line {number} of {path}", kind)
        for number, line in enumerate(_text(path).split("\n"), start=1)
        if line
    ]


def _parse_json(text: str, place: str, kind: type[Record]) -> Record:
    """The JSON object in ``text``; ``place`` is where it stands."""
    try:
        return _checked(json.loads(text), place, kind)
    except json.JSONDecodeError as error:
        raise StudyError(
            f"{place} is not JSON ({error.msg}): it is cut off or damaged, restore it"
        ) from error


def _checked(found: Any, place: str, kind: type[Record]) -> Record:
    """``found`` as a record of ``kind``."""
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        given = "" if first["type"] == "missing" else f", not {first['input']!r:.60}"
        said = f"{field}: {first['msg']}" if field else first["msg"]
        raise StudyError(f"{place} does not fit ({said}{given}): restore it") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(f"{path} cannot be read ({_said(error)}): restore it") from error


def _said(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split())


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


__all__ = ["Study", "StudyError", "read_studies"]


def read_studies(paths: Sequence[Path]) -> list[Study]:
    """The studies in ``paths``, in their order; plain runs are collected by recipe and task weight, last.

    A path with study.json is that study. A path with config.yaml is a run, any other one a folder of such;
    a run without result.json counts as running. A path that is given twice counts once.
    """
    given = list(dict.fromkeys(path.resolve() for path in paths))
    folders = [path for path in given if (path / "study.json").is_file()]
    runs = [run for path in given if path not in folders for run in _runs_in(path)]
    return [*map(_read_study, folders), *_collect(dict.fromkeys(runs))]


def _read_study(path: Path) -> Study:
    described = read_json(path / "study.json", StudyRecord)
    if not (path / "trials.jsonl").is_file():
        raise StudyError(f"{path} has no trials.jsonl: the study has not begun, go on with it by --resume")
    trials = read_lines(path / "trials.jsonl", TrialRecord)
    _check_trials(path, trials, described)
    return Study(
        path=path,
        name=described.name,
        kind=described.kind,
        recipe=described.recipe,
        gates=described.gates,
        trials_per_gate=described.trials,
        experts=described.experts,
        alpha=described.alpha,
        settings=described.settings,
        space=described.space,
        trials=to_frame(trial.row(_folder(path, trial.run)) for trial in trials),
    )


def _check_trials(path: Path, trials: list[TrialRecord], described: StudyRecord) -> None:
    seen: set[tuple[str, int]] = set()
    for number, trial in enumerate(trials, start=1):
        place, key = f"line {number} of {path / 'trials.jsonl'}", (trial.gate, trial.index)
        if trial.gate not in described.gates:
            raise StudyError(f"{place} is of gate {trial.gate!r}, which study.json does not list: restore it")
        if trial.index >= described.trials:
            raise StudyError(
                f"{place} is trial {trial.index} of {trial.gate}, and study.json asks for {described.trials} "
                f"a gate, counted from 0: restore it"
            )
        if key in seen:
            raise StudyError(f"{place} is a second trial {trial.index} of {trial.gate}: restore the file")
        seen.add(key)


def _folder(study: Path, run: str | None) -> Path | None:
    folder = None if run is None else study / run
    return folder if folder is not None and folder.is_dir() else None


def _runs_in(path: Path) -> list[Path]:
    if not path.is_dir():
        raise StudyError(f"{path} is no folder: give the folder of a study, of a run, or one that holds runs")
    if (path / "config.yaml").is_file():
        return [path]
    runs = sorted(entry.parent for entry in path.glob("*/config.yaml"))
    if not runs:
        raise StudyError(
            f"{path} holds neither a study (study.json) nor runs (config.yaml): give the folder of a study, "
            f"of a run, or one that holds runs"
        )
    return runs


def _collect(runs: Iterable[Path]) -> list[Study]:
    groups: dict[tuple[str, float | None], list[tuple[Path, RunRecord]]] = {}
    for run in runs:
        config = read_yaml(run / "config.yaml", RunRecord)
        groups.setdefault((config.recipe, config.loss.alpha), []).append((run, config))
    return [_of_runs(*group, found) for group, found in groups.items()]


def _of_runs(recipe: str, alpha: float | None, runs: list[tuple[Path, RunRecord]]) -> Study:
    by_gate: dict[str, list[dict[str, Any]]] = {}
    for run, config in sorted(runs, key=lambda pair: (pair[1].seed, pair[0])):
        of_gate = by_gate.setdefault(config.gate_name, [])
        of_gate.append(_read_run(run, config, len(of_gate)).row(run))
    gates = sorted(by_gate, key=_place)
    experts = {config.expert_count for _, config in runs if config.gate_name != "dense"}
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
        trials=to_frame(trial for gate in gates for trial in by_gate[gate]),
    )


def _place(gate: str) -> tuple[int, str]:
    return (GATE_ORDER.index(gate) if gate in GATE_ORDER else len(GATE_ORDER), gate)


def _read_run(run: Path, config: RunRecord, index: int) -> TrialRecord:
    finished = (run / "result.json").is_file()
    result = read_json(run / "result.json", ResultRecord) if finished else ResultRecord(status="running")
    return TrialRecord(
        gate=config.gate_name, index=index, params={"seed": config.seed}, **result.model_dump()
    )
