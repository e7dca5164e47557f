"""A study is a folder: all that tables, curves and the page are made from.

``study.json`` (what the study is), ``trials.jsonl`` (a line for each trial), ``runs/`` (a run folder for each
trial that this machine ran) and, without another storage, ``study.sqlite``.

Which study is meant: a new one, one to go on with, or one that another machine has started.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from comet_moe.config import BertConfig, TrainConfig, parse_setting
from comet_moe.config.schema import absolute_path
from comet_moe.exceptions import StudyError
from comet_moe.io import as_json, write_text
from comet_moe.training.run import RunFolder
from comet_moe.tuning.queue import Queue, Row, run_name
from comet_moe.tuning.storage import Busy, Storage, exclusive, sqlite_url, without_password
from comet_moe.tuning.study import Definition, check_definition, define
from comet_moe.tuning.trial import runner_for


class StudyFolder:
    """The files of one study on this machine."""

    def __init__(self, path: Path):
        self.path = path
        self.study_file = path / "study.json"
        self.trials_file = path / "trials.jsonl"

    @property
    def own_storage(self) -> str:
        """The storage inside the folder."""
        return sqlite_url(self.path / "study.sqlite")

    def holds_study(self) -> bool:
        """Whether there is a study here; a folder with anything else is an error."""
        if self.path.exists() and not self.path.is_dir():
            raise StudyError(f"{self.path} is a file, and a study is a folder: choose another place")
        if self.study_file.exists():
            return True
        known = {"runs"}  # runs that were made before are taken as they are
        if self.path.exists() and any(
            entry.name not in known and not entry.name.startswith((".", "study.sqlite"))
            for entry in self.path.iterdir()
        ):
            raise StudyError(f"{self.path} holds files but no study (no study.json): choose another place")
        return False

    def description(self) -> dict[str, Any]:
        """What ``study.json`` says."""
        try:
            found: dict[str, Any] = json.loads(self.study_file.read_text(encoding="utf-8"))
            return found
        except (OSError, ValueError) as error:
            raise StudyError(f"{self.study_file} cannot be read ({error}): restore it") from error

    @contextmanager
    def held(self, gate: str, index: int) -> Iterator[bool]:
        """Keep other processes of this machine off a trial's run; False if one is at it."""
        with ExitStack() as stack:
            try:
                stack.enter_context(exclusive(self.path / ".held" / f"{gate}-{index}", seconds=1))
                mine = True
            except Busy:
                mine = False
            yield mine

    def describe(
        self,
        definition: Definition,
        name: str,
        settings: list[str],
        storage: str | None,
        keep_models: bool,
    ) -> None:
        """Write ``study.json``; ``storage`` is None for the folder's own."""
        first = definition.base[definition.gates[0]]
        described = {
            "kind": definition.kind,
            "name": name,
            "recipe": definition.recipe,
            "gates": definition.gates,
            "trials": definition.trials,
            "seed": definition.seed,
            "settings": settings,
            "experts": first.num_experts,
            "alpha": first.loss.alpha if isinstance(first, TrainConfig) else None,
            "storage": None if storage is None else without_password(storage),
            "keep_models": keep_models,
            "space": definition.model_dump(mode="json")["space"],
        }
        write_text(self.study_file, as_json(described, indent=2) + "\n")

    def write_trials(self, rows: list[Row]) -> None:
        """Write ``trials.jsonl``."""
        write_text(self.trials_file, "".join(as_json(row) + "\n" for row in rows))

    def run(self, gate: str, index: int) -> Path:
        """The folder of a trial's run."""
        return self.path / run_name(gate, index)

    def keep_best_model(self, gate: str, load_run: Callable[[Path], RunFolder]) -> None:
        """Remove the weights of all finished trials of ``gate`` here but the best one's."""
        losses = {}
        for path in (self.path / "runs").glob(f"{gate}-[0-9]*"):
            result = path / "result.json"
            if path.name.removeprefix(f"{gate}-").isdigit() and result.exists():
                loss = json.loads(result.read_text(encoding="utf-8"))["validation_loss"]
                losses[path] = (loss is None, loss or 0.0, path.name)
        best = min(losses, key=losses.__getitem__, default=None)
        for path in losses:
            if path != best:
                load_run(path).drop_model()


DEFAULT_HEARTBEAT = 10

_PLACES = ("data.path", "teacher")
"""Settings that may differ from machine to machine."""


@dataclass(frozen=True)
class Request:
    """What was asked for; None is as saved, or the default of a new study.

    Attributes:
        kind: of study.
        recipe: a name or a path to a YAML file.
        out: the study's folder on this machine.
        gates: names.
        trials: for each gate.
        seed: of the drawing.
        settings: of the form "a.b=c".
        storage: a URL; None for an SQLite file in the folder.
        name: of the study in the storage; None for the folder's name.
        resume: go on with what the folder holds.
        add_trials: for each gate, to those asked for before.
        heartbeat: seconds between signs of life.
        keep_models: of all trials, not only the best of each gate.
    """

    kind: Literal["tuning", "ablation"]
    recipe: str
    out: Path
    gates: Sequence[str] | None = None
    trials: int | None = None
    seed: int | None = None
    settings: Sequence[str] = ()
    storage: str | None = None
    name: str | None = None
    resume: bool = False
    add_trials: int = 0
    heartbeat: int | None = None
    keep_models: bool = False


@dataclass(frozen=True)
class OpenStudy:
    """A study that workers can be put to.

    Attributes:
        folder: on this machine.
        queue: of its trials.
        settings: as they were given, by name; places mean the same from every folder.
        storage: its URL, None for the folder's own.
        keep_models: of all trials.
    """

    folder: StudyFolder
    queue: Queue
    settings: dict[str, str]
    storage: str | None
    keep_models: bool

    @property
    def places(self) -> dict[str, str]:
        """Where this machine has the data, and a teacher, as far as it was said."""
        return {name: self.settings[name].partition("=")[2] for name in _PLACES if name in self.settings}

    def describe(self, definition: Definition) -> None:
        """Bring ``study.json`` up to date."""
        self.folder.describe(
            definition, self.queue.name, list(self.settings.values()), self.storage, self.keep_models
        )


def begin_study(request: Request, default_trials: int) -> OpenStudy:
    """Open the study of ``request`` with its first trials queued; a mistake leaves nothing behind."""
    folder = StudyFolder(request.out)
    if folder.holds_study():
        return _again(folder, request)
    if request.add_trials:
        raise StudyError(f"{request.out} holds no study to add to: start one without --add-...")
    definition = None
    if request.gates is not None:
        definition = define(
            request.kind,
            request.recipe,
            request.gates,
            default_trials if request.trials is None else request.trials,
            request.seed or 0,
            request.settings,
            request.heartbeat or DEFAULT_HEARTBEAT,
        )
        _check_models(definition)
    elif request.storage is None:
        raise StudyError("which gates? Name them with --gates, as in --gates topk,comet,comet+")
    name = request.name or request.out.absolute().name
    queue = Queue(Storage(request.storage or folder.own_storage), name)
    saved = queue.definition() if definition is None else queue.start(definition)
    if saved is None:
        raise StudyError(f"the storage has no study {name}: name its gates with --gates to start it")
    _check(saved, request)
    study = OpenStudy(
        folder, queue, _by_name(request.settings), request.storage and queue.storage.url, request.keep_models
    )
    return _filled(study, saved)


def _again(folder: StudyFolder, request: Request) -> OpenStudy:
    if not (request.resume or request.add_trials):
        raise StudyError(f"{folder.path} holds a study already: go on with --resume, or name another --out")
    described = folder.description()
    name, storage = described["name"], described["storage"]
    if request.name not in (None, name):
        raise StudyError(f"the study in {folder.path} is named {name!r}, got --name {request.name!r}")
    url = request.storage or storage or folder.own_storage
    queue = Queue(Storage(url), name)
    if without_password(queue.storage.url) != (storage or folder.own_storage):
        raise StudyError(f"the study in {folder.path} has another storage: leave --storage out")
    saved = queue.known_definition()
    _check(saved, request)
    definition = queue.add(request.add_trials) if request.add_trials else saved
    study = OpenStudy(
        folder,
        queue,
        _by_name([*described["settings"], *request.settings]),
        storage and queue.storage.url,
        request.keep_models or described.get("keep_models", False),
    )
    return _filled(study, definition)


def _check(saved: Definition, request: Request) -> None:
    check_definition(
        saved,
        request.kind,
        request.recipe,
        request.gates,
        request.trials,
        request.seed,
        request.heartbeat,
        [setting for setting in request.settings if setting.partition("=")[0] not in _places_of(saved)],
    )


def _places_of(definition: Definition) -> tuple[str, ...]:
    """Those of ``_PLACES`` that the study has."""
    students = isinstance(definition.base[definition.gates[0]], BertConfig)
    return _PLACES if students else _PLACES[:1]


def _check_models(definition: Definition) -> None:
    """Build each gate's model once, on its data: what fits no data is found before anything is written."""
    runner = runner_for(definition.base[definition.gates[0]])
    for config in definition.base.values():
        runner.check(config)


def _filled(study: OpenStudy, definition: Definition) -> OpenStudy:
    study.queue.storage.set_heartbeat(definition.heartbeat)
    study.queue.fill(definition)
    study.describe(definition)
    study.folder.write_trials(study.queue.rows(definition))
    return study


def _by_name(settings: Sequence[str]) -> dict[str, str]:
    """The last of each; places from the root."""
    found = {setting.partition("=")[0]: setting for setting in settings}
    for name in set(_PLACES) & set(found):
        path = parse_setting(found.pop(name))[1]
        if not path.is_null:
            found[name] = f"{name}={absolute_path(path)}"
    return found
