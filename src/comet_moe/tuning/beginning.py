"""Which study is meant: a new one, one to go on with, or one that another machine has started."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from comet_moe.recipes import parse_setting
from comet_moe.recipes.schema import absolute
from comet_moe.training import open_dataset
from comet_moe.tuning.definition import Definition, check_definition, define
from comet_moe.tuning.errors import StudyProblem
from comet_moe.tuning.folder import StudyFolder
from comet_moe.tuning.queue import Queue
from comet_moe.tuning.storage import Storage

_DATA_PATH = "data.path"  # the one setting that may differ from machine to machine


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
    heartbeat: int = 10


@dataclass(frozen=True)
class OpenStudy:
    """A study that workers can be put to.

    Attributes:
        folder: on this machine.
        queue: of its trials.
        definition: what the study is.
        data_path: where this machine has the data, or None.
    """

    folder: StudyFolder
    queue: Queue
    definition: Definition
    data_path: str | None


def begin_study(request: Request, default_trials: int) -> OpenStudy:
    """Open the study of ``request`` with its trials queued; a mistake leaves nothing behind."""
    folder = StudyFolder(request.out)
    if folder.holds_study():
        return _again(folder, request)
    if request.add_trials:
        raise StudyProblem(f"{request.out} holds no study to add trials to: start one with --trials")
    definition = None
    if request.gates is not None:
        trials = default_trials if request.trials is None else request.trials
        definition = define(
            request.kind, request.recipe, request.gates, trials, request.seed or 0, request.settings
        )
        open_dataset(definition.base[definition.gates[0]])  # workers find it prepared
    elif request.storage is None:
        raise StudyProblem("which gates? Name them with --gates, as in --gates topk,comet,comet+")
    name = request.name or request.out.absolute().name
    queue = Queue(Storage(request.storage or folder.own_storage, request.heartbeat), name)
    saved = queue.definition() if definition is None else queue.start(definition)
    if saved is None:
        raise StudyProblem(f"the storage has no study {name}: name its gates with --gates to start it")
    _check(saved, request)
    return _opened(folder, queue, saved, list(request.settings), request.storage)


def _again(folder: StudyFolder, request: Request) -> OpenStudy:
    if not (request.resume or request.add_trials):
        raise StudyProblem(f"{folder.path} holds a study already: go on with --resume, or name another --out")
    described = folder.description()
    storage = request.storage or described["storage"]
    queue = Queue(Storage(storage or folder.own_storage, request.heartbeat), described["name"])
    saved = queue.definition()
    if saved is None:
        raise StudyProblem(f"the storage of {folder.path} has no study {described['name']}: restore it")
    _check(saved, request)
    definition = queue.add(request.add_trials) if request.add_trials else saved
    return _opened(folder, queue, definition, [*described["settings"], *request.settings], storage)


def _check(saved: Definition, request: Request) -> None:
    shared = [setting for setting in request.settings if not setting.startswith(f"{_DATA_PATH}=")]
    check_definition(saved, request.kind, request.recipe, request.gates, request.trials, request.seed, shared)


def _opened(
    folder: StudyFolder, queue: Queue, definition: Definition, settings: list[str], storage: str | None
) -> OpenStudy:
    queue.fill(definition)
    kept = {setting.partition("=")[0]: setting for setting in settings}  # the last of each counts
    data_path = None
    if _DATA_PATH in kept:
        data_path = absolute(parse_setting(kept[_DATA_PATH])[1])
        kept[_DATA_PATH] = f"{_DATA_PATH}={data_path}"
    folder.describe(definition, queue.name, list(kept.values()), storage)
    folder.write_trials(queue.rows(definition))
    return OpenStudy(folder, queue, definition, data_path)
