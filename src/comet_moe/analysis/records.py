"""Files of a study or a run, checked as they are read: what is missing or wrong is named in one sentence."""

import json
import math
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, NonNegativeInt, PositiveInt, ValidationError

from comet_moe.analysis.study import StudyError

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
