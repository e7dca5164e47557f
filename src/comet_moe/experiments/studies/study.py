"""Create a study, resume one, or join one that another machine has created."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comet_moe.exceptions import RecipeError, StudyError
from comet_moe.experiments.config import (
    AnyConfig,
    BertConfig,
    TrainConfig,
    load_config,
    parse_setting,
    recipe_name,
)
from comet_moe.experiments.config.schema import absolute_path
from comet_moe.experiments.studies.defaults import (
    DEFAULT_GATES,
    DEFAULT_HEARTBEAT,
    DEFAULT_SEED,
    DEFAULT_TRIALS,
)
from comet_moe.experiments.studies.definition import (
    PATH_SETTINGS,
    StudyDefinition,
    check_same_study,
    define_study,
    paths_of,
    select_new_gates,
)
from comet_moe.experiments.studies.folder import StudyFolder
from comet_moe.experiments.studies.queue import TrialQueue
from comet_moe.experiments.studies.records import StudyKind, StudyRecord
from comet_moe.experiments.studies.restore import restore_storage
from comet_moe.experiments.studies.storage import Storage, may_open, without_password
from comet_moe.experiments.studies.table_defaults import PruneMethod
from comet_moe.experiments.studies.trial import Runner, runner_for


@dataclass(frozen=True)
class StudyOptions:
    """The options of `tune` and `ablate`; None stands for the saved value, or the default of a new study.

    The default gates are those of an ablation; a new tuning study must name its own.

    Attributes:
        kind: "tuning" or "ablation".
        recipe: a name or a path to a YAML file.
        out: the study's folder on this machine.
        gates: names of the gates.
        trials: number of trials per gate.
        seed: seed of the sampling.
        settings: overrides of the recipe, of the form "a.b=c".
        storage: a URL; None for an SQLite file in the folder.
        name: name of the study in the storage; None for the folder's name.
        resume: resume the study in the folder.
        add_trials: number of trials to add per gate.
        add_gates: names of gates to add.
        only_gates: names of the gates to train; empty for all of the study.
        heartbeat: seconds between two heartbeats of a running trial.
        keep_models: keep the weights of all trials, not only of each gate's best one.
        prune: how trials are pruned.
    """

    kind: StudyKind
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
    add_gates: Sequence[str] = ()
    only_gates: Sequence[str] = ()
    heartbeat: int | None = None
    keep_models: bool = False
    prune: PruneMethod | None = None


@dataclass(frozen=True)
class StudyHandle:
    """A study in its storage, and its folder on this machine.

    Attributes:
        folder: folder of the study on this machine.
        queue: the trials of the study.
        settings: overrides of the recipe by key, as "a.b=c"; paths are absolute.
        storage: its URL; None for the SQLite file in the folder.
        keep_models: keep the weights of all trials.
    """

    folder: StudyFolder
    queue: TrialQueue
    settings: dict[str, str]
    storage: str | None
    keep_models: bool

    @property
    def paths(self) -> dict[str, str]:
        """The paths of data and teacher on this machine, as far as they were given."""
        return {
            name: self.settings[name].partition("=")[2] for name in PATH_SETTINGS if name in self.settings
        }

    def write_study(self, definition: StudyDefinition) -> None:
        """Update ``study.json``."""
        self.folder.write_study(
            StudyRecord(
                kind=definition.kind,
                name=self.queue.name,
                recipe=definition.recipe,
                gates=definition.gates,
                trials=definition.trials,
                seed=definition.seed,
                settings=list(self.settings.values()),
                storage=None if self.storage is None else without_password(self.storage),
                keep_models=self.keep_models,
                prune=definition.prune,
                **_facts(definition),
            )
        )


def open_study(options: StudyOptions) -> StudyHandle:
    """Create, resume or join the study, and queue its first trials; an error leaves no files behind."""
    folder = StudyFolder(options.out)
    load = _load_study if folder.contains_study() else _create_study
    study, definition = load(folder, options)
    study.queue.storage.set_heartbeat(definition.heartbeat)
    study.queue.fill(definition)
    study.write_study(definition)
    study.folder.write_trials(study.queue.records(definition))
    return study


def _create_study(folder: StudyFolder, options: StudyOptions) -> tuple[StudyHandle, StudyDefinition]:
    """A new study, or one that is in the storage and has no folder on this machine yet."""
    if options.add_trials or options.add_gates:
        raise StudyError(
            f"{options.out} has no study to add to: create one without --add-trials, --add-seeds and "
            f"--add-gates"
        )
    name = options.name or options.out.absolute().name
    queue = definition = None
    if options.gates is None and options.storage is not None:  # to join a study its gates need not be given
        queue = TrialQueue(Storage(options.storage), name)
        definition = queue.find_definition()
    definition = definition or _define_study(options)
    _check_only_gates(definition.gates, options)
    queue = queue or TrialQueue(
        Storage(folder.sqlite_url if options.storage is None else options.storage), name
    )
    saved = queue.create(definition)
    _check_options(saved, options)
    _check_only_gates(saved.gates, options)  # another machine may have been faster
    storage = None if options.storage is None else queue.storage.url
    return StudyHandle(folder, queue, _by_key(options.settings), storage, options.keep_models), saved


def _define_study(options: StudyOptions) -> StudyDefinition:
    gates = options.gates
    if gates is None:
        gates = default_gates(options.kind, load_config(options.recipe, options.settings))
    definition = define_study(
        options.kind,
        options.recipe,
        gates,
        options.trials or DEFAULT_TRIALS[options.kind],
        options.seed or DEFAULT_SEED,
        options.settings,
        options.heartbeat or DEFAULT_HEARTBEAT,
        options.prune,
    )
    _check_models(definition)
    return definition


def default_gates(kind: str, config: AnyConfig) -> list[str]:
    """The gates of a study that names none; images have no keys, so that a hash gate cannot be used."""
    has_keys = isinstance(config, BertConfig) or config.model.kind == "rating"
    return [gate for gate in DEFAULT_GATES[kind] if has_keys or not gate.startswith("hash")]


def _load_study(folder: StudyFolder, options: StudyOptions) -> tuple[StudyHandle, StudyDefinition]:
    if not (options.resume or options.add_trials or options.add_gates):
        raise StudyError(
            f"{folder.path} has a study already: resume it with --resume, or choose another --out"
        )
    record = folder.read_study()
    if options.name not in (None, record.name):
        raise StudyError(f"the study in {folder.path} is named {record.name!r}, got --name {options.name!r}")
    queue = None
    if record.storage is not None or folder.sqlite_file.exists():
        queue = _open_queue(folder, record, options)
    saved = _redefine_study(folder, record, options) if queue is None else queue.definition()
    _check_options(saved, options)
    _check_only_gates([*saved.gates, *options.add_gates], options)
    added = _define_gates(record, saved, options) if options.add_gates else None
    if queue is None:
        restore_storage(folder, record, saved)
        queue = _open_queue(folder, record, options)
    is_extended = options.add_trials or options.add_gates
    definition = queue.extend(options.add_trials, added) if is_extended else saved
    settings = _by_key([*record.settings, *options.settings])
    storage = None if record.storage is None else queue.storage.url
    keep_models = options.keep_models or record.keep_models
    return StudyHandle(folder, queue, settings, storage, keep_models), definition


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


def _define_gates(record: StudyRecord, saved: StudyDefinition, options: StudyOptions) -> StudyDefinition:
    """The definition of the gates to add, with the recipe and the settings of the ``saved`` study."""
    known = next((gate for gate in options.add_gates if gate in saved.gates), None)
    if known is not None:
        raise StudyError(f"gate {known} is in the saved study already: leave it out of --add-gates")
    paths = paths_of(saved.base[saved.gates[0]])
    settings = [f"{key}={path}" for key, path in paths.items() if path is not None]
    settings += [*record.settings, *options.settings]
    gates, trials = [*saved.gates, *options.add_gates], saved.trials + options.add_trials
    return select_new_gates(saved, _define_like(record, gates, trials, settings, options))


def _define_like(
    record: StudyRecord, gates: Sequence[str], trials: int, settings: Sequence[str], options: StudyOptions
) -> StudyDefinition:
    """A study of the kind of ``record`` with these gates, trials and settings; the last of a key counts."""
    return _define_study(
        replace(
            options,
            kind=record.kind,
            gates=gates,
            trials=trials,
            seed=record.seed,
            settings=list(_by_key(settings).values()),
            prune=record.prune,
        )
    )


def _facts(definition: StudyDefinition) -> dict[str, Any]:
    """What ``study.json`` has of the configurations."""
    first = definition.base[definition.gates[0]]
    return {
        "experts": max(config.num_experts for config in definition.base.values()),
        "alpha": first.loss.alpha if isinstance(first, TrainConfig) else None,
        "space": definition.model_dump(mode="json")["space"],
    }


def _check_options(saved: StudyDefinition, options: StudyOptions) -> None:
    may_differ = paths_of(saved.base[saved.gates[0]])
    check_same_study(
        saved,
        kind=options.kind,
        recipe=options.recipe,
        gates=options.gates,
        trials=options.trials,
        seed=options.seed,
        heartbeat=options.heartbeat,
        prune=options.prune,
        settings=[setting for setting in options.settings if setting.partition("=")[0] not in may_differ],
    )


def _check_only_gates(gates: Sequence[str], options: StudyOptions) -> None:
    """Raise StudyError if the study, which has ``gates``, is to train another one."""
    for gate in options.only_gates:
        if gate not in gates:
            raise StudyError(
                f"gate {gate} is not in the study, which has {', '.join(gates)}: leave it out of "
                f"--only-gates, or add it to the study"
            )


def _check_models(definition: StudyDefinition) -> None:
    """Raise RecipeError if no trial of a gate has a model that fits the data, before files are written."""
    runner = runner_for(definition.base[definition.gates[0]])
    for gate in definition.gates:
        _check_models_of(gate, definition, runner)


def _check_models_of(gate: str, definition: StudyDefinition, runner: Runner) -> None:
    """Build models of ``gate`` in the order of its trials, up to the first that can be built."""
    refused: dict[str, RecipeError] = {}
    for index in range(definition.trials):
        config = definition.config(gate, index)
        # Whether a model can be built does not depend on these.
        model = config.model_dump_json(exclude={"seed": True, "training": {"learning_rate"}})
        if model in refused:
            continue
        try:
            runner.check(config)
        except RecipeError as error:
            refused[model] = error
        else:
            return
    raise next(iter(refused.values()))


def _by_key(settings: Sequence[str]) -> dict[str, str]:
    """The last setting of each key; paths are made absolute."""
    by_key = {setting.partition("=")[0]: setting for setting in settings}
    for key in set(PATH_SETTINGS) & set(by_key):
        path = parse_setting(by_key.pop(key))[1]
        if not path.is_null:
            by_key[key] = f"{key}={absolute_path(path)}"
    return by_key
