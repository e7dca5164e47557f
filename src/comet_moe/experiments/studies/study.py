"""Create a study, resume one, or join one that another machine has created.

`open_study` defines, checks and opens a study once. Its handle has what workers, displays and tables need.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Self

from comet_moe.exceptions import RecipeError, StudyError
from comet_moe.experiments.config import (
    AnyConfig,
    BertConfig,
    TrainConfig,
    load_config,
    override_config,
    parse_setting,
    recipe_name,
)
from comet_moe.experiments.config.schema import absolute_path
from comet_moe.experiments.studies.budget import Trained
from comet_moe.experiments.studies.defaults import (
    DEFAULT_GATES,
    DEFAULT_HEARTBEAT,
    DEFAULT_SEED,
    DEFAULT_TRIALS,
)
from comet_moe.experiments.studies.definition import (
    PATH_SETTINGS,
    StudyDefinition,
    StudyOptions,
    check_same_study,
    define_study,
    paths_of,
    select_new_gates,
)
from comet_moe.experiments.studies.folder import StudyFolder
from comet_moe.experiments.studies.networks import network_settings
from comet_moe.experiments.studies.process import WorkerConfig
from comet_moe.experiments.studies.queue import TrialQueue
from comet_moe.experiments.studies.reading import read_trials
from comet_moe.experiments.studies.records import StudyRecord, TrialRecord
from comet_moe.experiments.studies.storage import Storage, may_open, without_password
from comet_moe.experiments.studies.trial import Runner, runner_for
from comet_moe.experiments.training.run import RunFolder

ROUNDING = 1e-12
"""How much a sampled value may differ, relatively: two machines may round a logarithm differently."""


@dataclass
class StudyHandle:
    """A study in its storage, and its folder on this machine.

    As a context manager it closes the connections to the storage at the end of the block.

    Attributes:
        definition: the study as it was when the storage was last read.
        settings: overrides of the recipe by key, as "a.b=c"; paths are absolute.
        storage: its URL; None for the SQLite file in the folder.
        runner: runs trials in this process, with the data that they share.
        trials: one record per planned trial, as of the last reading.
    """

    folder: StudyFolder
    queue: TrialQueue
    definition: StudyDefinition
    settings: dict[str, str]
    storage: str | None
    keep_models: bool
    runner: Runner
    trials: list[TrialRecord] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.queue.storage.close()

    @property
    def paths(self) -> dict[str, str]:
        """The paths of data and teacher on this machine, as far as they were given."""
        return {
            name: self.settings[name].partition("=")[2] for name in PATH_SETTINGS if name in self.settings
        }

    def base_config(self) -> AnyConfig:
        """The configuration of the first gate, with the paths of this machine."""
        return override_config(self.definition.base[self.definition.gates[0]], self.paths)

    def refresh(self) -> list[TrialRecord]:
        """Read the storage and update the files; returns the trials that have finished since then."""
        definition = self.queue.definition()
        if definition != self.definition:  # trials were added, here or on another machine
            self.definition = definition
            self.write_study()
        known = {(trial.gate, trial.index) for trial in self.trials if trial.is_finished}
        trials = self.queue.records(definition)
        if trials != self.trials:
            self.folder.write_trials(trials)
            self.trials = trials
        return [trial for trial in trials if trial.is_finished and (trial.gate, trial.index) not in known]

    def summarise(self, gates: Sequence[str]) -> dict[str, Trained]:
        """Mean validation loss and mean seconds of the complete trials of each of ``gates`` that has some."""
        found = {}
        for gate in gates:
            complete = [trial for trial in self.trials if trial.gate == gate and trial.status == "complete"]
            losses = [trial.validation_loss for trial in complete if trial.validation_loss is not None]
            if losses:
                seconds = fmean(trial.seconds or 0.0 for trial in complete)
                found[gate] = Trained(fmean(losses), seconds, not any(map(self._can_train_on, complete)))
        return found

    def train_on(self, gates: Sequence[str]) -> int:
        """Open the trials of ``gates`` again that ran out of time; returns how many.

        They resume from their checkpoints, which have to be on this machine.
        """
        trials = [trial for trial in self.trials if trial.gate in gates and self._can_train_on(trial)]
        for trial in trials:
            self.queue.reopen(trial.gate, trial.index)
            self._run(trial).drop_result()  # after the mark: a run without a result is resumed in any case
        self.refresh()
        return len(trials)

    def _can_train_on(self, trial: TrialRecord) -> bool:
        is_cut = trial.status == "complete" and trial.converged is False
        return is_cut and self._run(trial).checkpoint_file.is_file()

    def _run(self, trial: TrialRecord) -> RunFolder:
        return self.runner.folder(self.folder.run_path(trial.gate, trial.index))

    def add_trials(self, trials: int) -> None:
        """Plan more trials per gate."""
        self.queue.extend(trials)
        self.refresh()

    def write_study(self) -> None:
        """Update ``study.json``."""
        definition = self.definition
        self.folder.write_study(
            StudyRecord(
                **definition.model_dump(include={"kind", "recipe", "trials", "seed", "prune"}),
                name=self.queue.name,
                gates=definition.gates,
                settings=list(self.settings.values()),
                storage=None if self.storage is None else without_password(self.storage),
                keep_models=self.keep_models,
                **_facts(definition),
            )
        )

    def worker_config(
        self,
        threads: int,
        only_gates: Sequence[str] = (),
        max_seconds: float | None = None,
        deadline: float | None = None,
    ) -> WorkerConfig:
        """What a worker on this machine needs to know; with ``only_gates`` it trains no others."""
        return WorkerConfig(
            folder=self.folder.path.absolute(),
            storage=self.queue.storage.url,
            name=self.queue.name,
            paths=self.paths,
            threads=threads,
            heartbeat=self.definition.heartbeat,
            keep_models=self.keep_models,
            only_gates=tuple(only_gates),
            max_seconds=max_seconds,
            deadline=deadline,
        )


def open_study(options: StudyOptions) -> StudyHandle:
    """Create, resume or join the study; an error leaves no files behind."""
    folder = StudyFolder(options.out)
    study = (_resume_study if folder.contains_study() else _create_study)(folder, options)
    study.write_study()
    study.refresh()
    return study


def _create_study(folder: StudyFolder, options: StudyOptions) -> StudyHandle:
    """A new study, or one that is in the storage and has no folder on this machine yet."""
    if options.add_trials or options.add_gates:
        raise StudyError(
            f"{options.out} has no study to add to: create one without --add-trials, --add-seeds and "
            f"--add-gates"
        )
    name = options.name or options.out.absolute().name
    queue = definition = runner = None
    if options.gates is None and options.storage is not None:  # to join a study its gates need not be given
        queue = TrialQueue(Storage(options.storage), name)
        definition = queue.find_definition()
    if definition is None:
        definition, runner = _define_study(options)
    _check_only_gates(definition.gates, options)
    url = folder.sqlite_url if options.storage is None else options.storage
    queue = queue or TrialQueue(Storage(url), name)
    saved = queue.create(definition)
    check_same_study(saved, options)
    _check_only_gates(saved.gates, options)  # another machine may have been faster
    return StudyHandle(
        folder,
        queue,
        saved,
        _by_key(options.settings),
        storage=None if options.storage is None else queue.storage.url,
        keep_models=options.keep_models,
        runner=runner or runner_for(saved.base[saved.gates[0]]),
    )


def _define_study(options: StudyOptions) -> tuple[StudyDefinition, Runner]:
    """The definition, and the runner that has built a model of each gate and opened the data for it."""
    gate = network_settings(options.gates[0]) if options.gates else []
    config = load_config(options.recipe, [*options.settings, *gate])
    runner = runner_for(config)
    definition = define_study(
        options.kind,
        options.recipe,
        options.gates or default_gates(options.kind, config),
        options.trials or DEFAULT_TRIALS[options.kind],
        options.seed or DEFAULT_SEED,
        options.settings,
        options.heartbeat or DEFAULT_HEARTBEAT,
        options.prune,
        runner,
    )
    for name in definition.gates:
        _check_models(name, definition, runner)
    return definition, runner


def default_gates(kind: str, config: AnyConfig) -> list[str]:
    """The gates of a study that names none; images have no keys, so that a hash gate cannot be used."""
    has_keys = isinstance(config, BertConfig) or config.model.kind == "rating"
    return [gate for gate in DEFAULT_GATES[kind] if has_keys or not gate.startswith("hash")]


def _check_models(gate: str, definition: StudyDefinition, runner: Runner) -> None:
    """Raise RecipeError if no trial of ``gate`` has a model that fits the data.

    Models are built in the order of the trials, up to the first that can be built.
    """
    refused: dict[str, RecipeError] = {}
    for index in range(definition.trials):
        config = definition.config(gate, index)
        # Whether a model can be built does not depend on these.
        model = config.model_dump_json(exclude={"seed": True, "training": {"learning_rate"}})
        if model not in refused:
            try:
                return runner.check(config)
            except RecipeError as error:
                refused[model] = error
    raise next(iter(refused.values()))


def _resume_study(folder: StudyFolder, options: StudyOptions) -> StudyHandle:
    if not (options.resume or options.add_trials or options.add_gates):
        raise StudyError(
            f"{folder.path} has a study already: resume it with --resume, or choose another --out"
        )
    record = folder.read_study()
    if options.name not in (None, record.name):
        raise StudyError(f"the study in {folder.path} is named {record.name!r}, got --name {options.name!r}")
    queue = saved = None
    if record.storage is not None or folder.sqlite_file.exists():
        queue = _open_queue(folder, record, options)
        saved = queue.find_definition()
    finished: list[TrialRecord] = []
    if saved is None:  # the storage was lost
        saved = _redefine_study(folder, record, options)
        finished = _read_finished(folder, record, saved)
    check_same_study(saved, options)
    _check_only_gates([*saved.gates, *options.add_gates], options)
    if options.resume:  # the command that added them was interrupted
        options = replace(options, add_gates=[gate for gate in options.add_gates if gate not in saved.gates])
    added = _define_gates(record, saved, options) if options.add_gates else None
    queue = queue or _open_queue(folder, record, options)
    definition = queue.create(saved, finished)
    if options.add_trials or added:
        definition = queue.extend(options.add_trials, added)
    return StudyHandle(
        folder,
        queue,
        definition,
        _by_key([*record.settings, *options.settings]),
        storage=None if record.storage is None else queue.storage.url,
        keep_models=options.keep_models or record.keep_models,
        runner=runner_for(definition.base[definition.gates[0]]),
    )


def _open_queue(folder: StudyFolder, record: StudyRecord, options: StudyOptions) -> TrialQueue:
    """The trials of the study of ``record`` in its storage."""
    saved_url = record.storage or folder.sqlite_url
    if options.storage is None and not may_open(saved_url, folder.path):
        raise StudyError(
            f"the study in {folder.path} names the storage {saved_url}, outside of its folder: if it is "
            f"yours, give it with --storage"
        )
    queue = TrialQueue(Storage(saved_url if options.storage is None else options.storage), record.name)
    if without_password(queue.storage.url) != saved_url:
        raise StudyError(f"the study in {folder.path} has another storage, {saved_url}: leave --storage out")
    return queue


def _redefine_study(folder: StudyFolder, record: StudyRecord, options: StudyOptions) -> StudyDefinition:
    """The definition of a study of which only ``study.json`` and ``trials.jsonl`` are left."""
    if recipe_name(options.recipe) != record.recipe:
        raise StudyError(
            f"{folder.study_file} is a study of {record.recipe}, got {options.recipe}: give the recipe of "
            f"that study, or choose another --out"
        )
    paths = [setting for setting in options.settings if setting.partition("=")[0] in PATH_SETTINGS]
    definition = _define_like(record, record.gates, record.trials, [*record.settings, *paths], options)
    for name, value in _facts(definition).items():
        if value != getattr(record, name):
            raise StudyError(
                f"{name} is {getattr(record, name)!r} in {folder.study_file}, and {options.recipe} gives "
                f"{value!r}: give the settings of that study, or choose another --out"
            )
    return definition


def _read_finished(
    folder: StudyFolder, record: StudyRecord, definition: StudyDefinition
) -> list[TrialRecord]:
    """The finished trials of ``trials.jsonl``; raises StudyError if they are not those of ``definition``."""
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


def _define_gates(record: StudyRecord, saved: StudyDefinition, options: StudyOptions) -> StudyDefinition:
    """The definition of the gates to add, with the recipe and the settings of the ``saved`` study."""
    for gate in options.add_gates:
        if gate in saved.gates:
            raise StudyError(f"gate {gate} is in the saved study already: leave it out of --add-gates")
    paths = paths_of(saved.base[saved.gates[0]])
    settings = [f"{key}={path}" for key, path in paths.items() if path is not None]
    settings += [*record.settings, *options.settings]
    gates, trials = [*saved.gates, *options.add_gates], saved.trials + options.add_trials
    return select_new_gates(saved, _define_like(record, gates, trials, settings, options))


def _define_like(
    record: StudyRecord, gates: list[str], trials: int, settings: Sequence[str], options: StudyOptions
) -> StudyDefinition:
    """A study of the kind of ``record`` with these gates, trials and settings; the last of a key counts."""
    given = replace(options, gates=gates, trials=trials, settings=list(_by_key(settings).values()))
    return _define_study(replace(given, kind=record.kind, seed=record.seed, prune=record.prune))[0]


def _facts(definition: StudyDefinition) -> dict[str, Any]:
    """What ``study.json`` has of the configurations."""
    first = definition.base[definition.gates[0]]
    return {
        "experts": max(config.num_experts for config in definition.base.values()),
        "alpha": first.loss.alpha if isinstance(first, TrainConfig) else None,
        "space": definition.model_dump(mode="json")["space"],
    }


def _check_only_gates(gates: Sequence[str], options: StudyOptions) -> None:
    """Raise StudyError if the study, which has ``gates``, is to train another one."""
    for gate in options.only_gates:
        if gate not in gates:
            raise StudyError(
                f"gate {gate} is not in the study, which has {', '.join(gates)}: leave it out of "
                f"--only-gates, or add it to the study"
            )


def _by_key(settings: Sequence[str]) -> dict[str, str]:
    """The last setting of each key; paths are made absolute."""
    by_key = {setting.partition("=")[0]: setting for setting in settings}
    for key in set(PATH_SETTINGS) & set(by_key):
        path = parse_setting(by_key.pop(key))[1]
        if path not in ("", "null"):
            by_key[key] = f"{key}={absolute_path(path)}"
    return by_key
