"""What a study is: which gates, how many trials each, what is drawn. Fixed when the study is started."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from comet_moe.config import (
    AnyConfig,
    Choice,
    LogUniform,
    Uniform,
    check_same_settings,
    load_config,
    load_search_space,
    override_config,
    parse_setting,
)
from comet_moe.exceptions import RecipeError, StudyError
from comet_moe.tuning.sampling import draw
from comet_moe.tuning.trial import runner_for


class Definition(BaseModel):
    """A study, complete: the same on every machine that works on it.

    Attributes:
        kind: "tuning" draws settings for each trial, "ablation" only another initialisation.
        recipe: as named in the configurations.
        seed: of the drawing.
        trials: for each gate.
        heartbeat: seconds between signs of life of a running trial.
        space: what is drawn, for each gate.
        base: each gate's configuration before anything is drawn.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["tuning", "ablation"]
    recipe: str
    seed: int
    trials: int
    heartbeat: int = 10
    space: dict[str, dict[str, Choice | Uniform | LogUniform]]
    base: dict[str, AnyConfig]

    @property
    def gates(self) -> list[str]:
        """In the order they were asked for."""
        return list(self.base)

    def values(self, gate: str, index: int) -> dict[str, Any]:
        """What is drawn for a trial."""
        return draw(self.space[gate], gate, self.seed, index)

    def config(self, gate: str, index: int) -> AnyConfig:
        """The configuration of a trial: what is drawn, and an initialisation of its own."""
        base = self.base[gate]
        return override_config(base, {**self.values(gate, index), "seed": base.seed + index})


def define(
    kind: Literal["tuning", "ablation"],
    recipe: str,
    gates: Sequence[str],
    trials: int,
    seed: int = 0,
    settings: Sequence[str] = (),
    heartbeat: int = 10,
) -> Definition:
    """The study of ``recipe`` with ``settings``; every trial's configuration is checked."""
    refuse_gate_setting(settings)
    twice = sorted({gate for gate in gates if list(gates).count(gate) > 1})
    if twice:
        raise StudyError(f"gate {twice[0]} is named twice")
    runner = runner_for(load_config(recipe, [*settings, f"gate={gates[0]}"]))
    base = {gate: runner.base(recipe, [*settings, f"gate={gate}"]) for gate in gates}
    space = {gate: load_search_space(recipe, gate, settings) if kind == "tuning" else {} for gate in gates}
    definition = Definition(
        kind=kind,
        recipe=base[gates[0]].recipe,
        seed=seed,
        trials=trials,
        heartbeat=heartbeat,
        space=space,
        base=base,
    )
    check_configurations(definition, 0)
    return definition


def check_configurations(definition: Definition, first: int) -> None:
    """Refuse a study in which a trial from index ``first`` on has a configuration that is not valid."""
    for gate in definition.gates:
        for index in range(first, definition.trials):
            definition.config(gate, index)


def refuse_gate_setting(settings: Sequence[str]) -> None:
    """A study has several gates: which ones is not a setting."""
    if any(parse_setting(setting)[0] == ["gate"] for setting in settings):
        raise StudyError("--set gate=... does not fit a study of several gates: name them with --gates")


def check_definition(
    saved: Definition,
    kind: str,
    recipe: str,
    gates: Sequence[str] | None,
    trials: int | None,
    seed: int | None,
    heartbeat: int | None,
    settings: Sequence[str],
) -> None:
    """Refuse what differs from the ``saved`` study; None is as saved."""
    refuse_gate_setting(settings)
    asked: dict[str, Any] = {
        "kind": kind,
        "gates": None if gates is None else list(gates),
        "trials": trials,
        "seed": seed,
        "heartbeat": heartbeat,
    }
    for name, value in asked.items():
        found = getattr(saved, name)
        if value is not None and value != found:
            advice = "add to it with --add-" + ("seeds" if kind == "ablation" else "trials")
            if name != "trials":
                advice = "leave it out, or name another --out"
            raise StudyError(f"{name} is {found!r} in the saved study, got {value!r}: {advice}")
    for gate in saved.gates:
        for setting in settings:
            key = setting.partition("=")[0]
            if key in saved.space[gate]:
                raise StudyError(f"{key} is drawn in the saved study: leave it out, or name another --out")
        try:
            name = load_config(recipe).recipe
            check_same_settings(saved.base[gate], name, [parse_setting(setting) for setting in settings])
        except RecipeError as error:
            raise StudyError(str(error).replace("saved run", "saved study")) from error


def parse_definition(text: str, source: str) -> Definition:
    """A definition from JSON; ``source`` is where it was read."""
    try:
        return Definition.model_validate_json(text)
    except ValidationError as error:
        said = error.errors(include_url=False)[0]["msg"]
        raise StudyError(f"{source} holds no study that this version can read: {said}") from error
