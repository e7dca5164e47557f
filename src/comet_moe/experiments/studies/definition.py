"""The definition of a study: gates, number of trials, search space. Gates and trials can only be added.

The values of trial i depend on the seed, the gate and i alone. So the trials are the same for any number of
workers, and trials that are added later do not change the first.
"""

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from comet_moe import __version__
from comet_moe.exceptions import RecipeError, StudyError
from comet_moe.experiments.config import (
    AnyConfig,
    BertConfig,
    Choice,
    LogUniform,
    SearchSpace,
    Uniform,
    check_same_settings,
    load_config,
    load_search_space,
    override_config,
    parse_setting,
    recipe_name,
    resolve_gates,
)
from comet_moe.experiments.studies.defaults import (
    DEFAULT_HEARTBEAT,
    DEFAULT_SEED,
    MAX_TRIALS,
    PruneMethod,
)
from comet_moe.experiments.studies.networks import gate_of, is_network_name, network_settings
from comet_moe.experiments.studies.records import StudyKind
from comet_moe.experiments.studies.trial import Runner, runner_for
from comet_moe.gates.registry import gate_names

PATH_SETTINGS = ("data.path", "teacher")
"""Settings that may differ between machines."""


def sample_values(space: SearchSpace, gate: str, seed: int, index: int) -> dict[str, Any]:
    """A value for each setting of ``space``, for trial ``index`` of ``gate``."""
    generator = np.random.default_rng([seed, zlib.crc32(gate.encode()), index])
    values: dict[str, Any] = {}
    for setting, distribution in sorted(space.items()):
        if isinstance(distribution, Choice):
            values[setting] = distribution.choice[generator.integers(len(distribution.choice))]
        elif isinstance(distribution, LogUniform):
            low, high = distribution.log
            value = math.exp(generator.uniform(math.log(low), math.log(high)))
            values[setting] = min(max(value, low), high)  # exp(log(x)) may miss x by a digit
        else:
            values[setting] = float(generator.uniform(*distribution.uniform))
    return values


@dataclass(frozen=True)
class StudyOptions:
    """The options of `tune` and `ablate`; None stands for the saved value, or the default of a new study.

    Attributes that are not explained are those of `StudyRecord`.

    Attributes:
        recipe: a name or a path to a YAML file.
        out: the study's folder on this machine.
        storage: a URL; None for an SQLite file in the folder.
        name: name of the study in the storage; None for the folder's name.
        resume: resume the study in the folder.
        add_trials: number of trials to add per gate.
        add_gates: names of gates to add.
        only_gates: names of the gates to train; empty for all of the study.
        heartbeat: seconds between two heartbeats of a running trial.
    """

    kind: StudyKind
    recipe: str
    out: Path
    gates: list[str] | None = None
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


class StudyDefinition(BaseModel):
    """A complete study, the same on every machine that works on it; see also `StudyRecord`.

    Attributes:
        heartbeat: seconds between two heartbeats of a running trial.
        base: the configuration of each gate, into which sampled values are put.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: StudyKind
    recipe: str
    seed: int
    trials: Annotated[int, Field(gt=0, le=MAX_TRIALS)]
    heartbeat: Annotated[int, Field(gt=0)] = DEFAULT_HEARTBEAT
    space: dict[str, dict[str, Choice | Uniform | LogUniform]]
    base: dict[str, AnyConfig]
    prune: PruneMethod | None = None

    @model_validator(mode="after")
    def _check_gates(self) -> "StudyDefinition":
        """The name of a gate becomes that of a folder: only names of gates are accepted."""
        unknown = next((gate for gate in (*self.base, *self.space) if not is_network_name(gate)), None)
        if unknown is not None or not self.base or self.base.keys() != self.space.keys():
            raise ValueError(f"gates must be some of {', '.join(gate_names())}, got {unknown!r}")
        return self

    @property
    def gates(self) -> list[str]:
        """In the order they were given."""
        return list(self.base)

    def sampled_values(self, gate: str, index: int) -> dict[str, Any]:
        """The values of a trial for the settings of the search space."""
        return sample_values(self.space[gate], gate, self.seed, index)

    def params(self, gate: str, index: int) -> dict[str, Any]:
        """All settings in which a trial differs from others of its gate: sampled values and seed."""
        return {**self.sampled_values(gate, index), "seed": self.base[gate].seed + index}

    def config(self, gate: str, index: int) -> AnyConfig:
        """The configuration of a trial."""
        return override_config(self.base[gate], self.params(gate, index))


def define_study(
    kind: StudyKind,
    recipe: str,
    gates: Sequence[str],
    trials: int,
    seed: int = DEFAULT_SEED,
    settings: Sequence[str] = (),
    heartbeat: int = DEFAULT_HEARTBEAT,
    prune: PruneMethod | None = None,
    runner: Runner | None = None,
) -> StudyDefinition:
    """The study of ``recipe`` with ``settings`` of the form "a.b=c"; all configurations are checked."""
    _refuse_gate_setting(settings)
    for gate, count in Counter(gates).items():
        if count > 1:
            raise StudyError(f"gate {gate} is given twice: give each gate once")
    runner = runner or runner_for(load_config(recipe, [*settings, *network_settings(gates[0])]))
    base = {gate: runner.base(recipe, [*settings, *network_settings(gate)]) for gate in gates}
    space = {
        gate: load_search_space(recipe, gate_of(gate), settings) if kind == "tuning" else {} for gate in gates
    }
    definition = StudyDefinition(
        kind=kind,
        recipe=base[gates[0]].recipe,
        seed=seed,
        trials=trials,
        heartbeat=heartbeat,
        space=space,
        base=base,
        prune=prune,
    )
    check_configurations(definition, first=0)
    return definition


def check_configurations(definition: StudyDefinition, first: int) -> None:
    """Raise RecipeError if the configuration of a trial from index ``first`` on is not valid."""
    for gate in definition.gates:
        for index in range(first, definition.trials):
            definition.config(gate, index)


def check_same_study(saved: StudyDefinition, options: StudyOptions) -> None:
    """Raise StudyError if an option differs from the ``saved`` study; paths of this machine may differ."""
    may_differ = paths_of(saved.base[saved.gates[0]])
    settings = [setting for setting in options.settings if setting.partition("=")[0] not in may_differ]
    _refuse_gate_setting(settings)
    given = {name: getattr(options, name) for name in ("kind", "gates", "trials", "seed", "heartbeat")}
    for name, value in given.items():
        old = getattr(saved, name)
        if value is not None and value != old:
            advice = {
                "trials": "add trials with --add-" + ("seeds" if options.kind == "ablation" else "trials"),
                "gates": "leave it out, add gates with --add-gates, or choose another --out",
            }.get(name, "leave it out, or choose another --out")
            raise StudyError(f"{name} is {old!r} in the saved study, got {value!r}: {advice}")
    if options.prune not in (None, saved.prune):
        how = "no trials" if saved.prune is None else f"by {saved.prune}"
        raise StudyError(
            f"the saved study prunes {how}, got --prune {options.prune}: leave it out, or choose another "
            f"--out"
        )
    name, overrides = recipe_name(options.recipe), [parse_setting(setting) for setting in settings]
    for gate in saved.gates:
        try:
            of_gate = resolve_gates(options.recipe, gate_of(gate), overrides)
            for key in (".".join(keys) for keys, _ in of_gate):
                if key in saved.space[gate]:
                    raise StudyError(
                        f"{key} is in the search space of the saved study: leave it out, or choose another "
                        f"--out"
                    )
            check_same_settings(saved.base[gate], name, of_gate)
        except RecipeError as error:
            raise StudyError(str(error).replace("saved run", "saved study")) from error


def _refuse_gate_setting(settings: Sequence[str]) -> None:
    """A study has several gates, so that a setting cannot choose one."""
    if any(parse_setting(setting)[0] == ["gate"] for setting in settings):
        raise StudyError("--set gate=... cannot choose the gates of a study: use --gates")


def select_new_gates(saved: StudyDefinition, defined: StudyDefinition) -> StudyDefinition:
    """The gates of ``defined`` that ``saved`` does not have, with the paths of ``saved``.

    Raises StudyError if a gate of ``saved`` has other settings in ``defined``: the recipe has changed, or
    settings of the study are missing.
    """
    first = saved.base[saved.gates[0]]
    base = {gate: override_config(config, paths_of(first)) for gate, config in defined.base.items()}
    for gate, config in saved.base.items():
        # BERT's configurations have the settings of all gates, also of those to be added.
        is_same = base[gate].model_dump(exclude={"gates"}) == config.model_dump(exclude={"gates"})
        if not is_same or defined.space[gate] != saved.space[gate]:
            raise StudyError(
                f"the recipe with the settings that were given does not make {gate} what it is in the saved "
                f"study: give the recipe and the settings of that study"
            )
    new = defined.base.keys() - saved.base.keys()
    update = {
        name: {gate: value for gate, value in by_gate.items() if gate in new}
        for name, by_gate in (("base", base), ("space", defined.space))
    }
    return defined.model_copy(update=update)


def paths_of(config: AnyConfig) -> dict[str, str | None]:
    """The settings of ``config`` that may differ between machines: the paths of data and teacher."""
    teacher = {"teacher": config.teacher} if isinstance(config, BertConfig) else {}
    return {"data.path": config.data.path, **teacher}


def parse_definition(text: str, source: str) -> StudyDefinition:
    """A definition from JSON; ``source`` names it in errors."""
    try:
        return StudyDefinition.model_validate_json(text)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        raise StudyError(
            f"{source} was not written by this version of comet-moe, {__version__} ({message}): start "
            "another study"
        ) from error
