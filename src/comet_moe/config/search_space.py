"""What tuning draws: the search space of a recipe, gate by gate.

A recipe's ``tuning`` section maps settings to what they are drawn from. ``all`` holds for every gate,
``search`` for those whose name ends in ``+``, then come a gate's own; those of a name with ``+`` are laid
over those without. ``fixed`` in the place of a draw leaves a setting as the recipe has it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from comet_moe.config.loader import (
    ConfigType,
    parse_setting,
    read_recipe,
    set_value,
    validate_config,
    validation_message,
)
from comet_moe.config.schema import GATE_NAMES, Positive, Section
from comet_moe.exceptions import RecipeError


class Choice(Section):
    """One of some values, each as likely."""

    choice: Annotated[tuple[bool | int | float | str, ...], Field(min_length=1)]


def _rising(ends: tuple[float, float]) -> tuple[float, float]:
    low, high = ends
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"a range must rise, got [{low}, {high}]")
    return ends


class Uniform(Section):
    """A number between two."""

    uniform: Annotated[tuple[float, float], AfterValidator(_rising)]


class LogUniform(Section):
    """A positive number between two, its logarithm uniform."""

    log: Annotated[tuple[Positive, Positive], AfterValidator(_rising)]


Distribution = Choice | Uniform | LogUniform
SearchSpace = dict[str, Distribution]

_SHARED = ("all", "search")


def load_search_space(recipe: str, gate: str, settings: Sequence[str] = ()) -> SearchSpace:
    """What is drawn for ``gate``, in the order of the recipe; what ``settings`` set is not."""
    section = read_recipe(recipe).get("tuning")
    if section is None:
        raise RecipeError(f"recipe {recipe} has no tuning section: there is nothing to draw")
    if not isinstance(section, Mapping):
        raise RecipeError(f"recipe {recipe}: tuning must be a mapping of settings, got {section!r}")
    unknown = sorted(set(section) - set(GATE_NAMES) - set(_SHARED))
    if unknown:
        raise RecipeError(f"recipe {recipe}: there is no setting tuning.{unknown[0]}")
    names = ["all", *(["search"] if gate.endswith("+") else []), gate.removesuffix("+"), gate]
    layers = [section.get(name) or {} for name in dict.fromkeys(names)]
    for name, layer in zip(dict.fromkeys(names), layers, strict=True):
        if not isinstance(layer, Mapping) or not all(isinstance(key, str) for key in layer):
            raise RecipeError(f"recipe {recipe}: tuning.{name} must be a mapping of settings, got {layer!r}")
        if "seed" in layer:
            raise RecipeError(f"recipe {recipe}: tuning.{name}.seed cannot be drawn: each trial has its own")
    given = [".".join(parse_setting(setting)[0]) for setting in settings]
    merged = {
        key: value
        for layer in layers
        for key, value in layer.items()
        if not any(key == name or key.startswith(f"{name}.") for name in given)
    }
    return {key: _draw(recipe, key, value) for key, value in merged.items() if value != "fixed"}


def override_config(config: ConfigType, values: Mapping[str, Any]) -> ConfigType:
    """``config`` with the settings ``values``, keys such as "gate.gamma", laid over and checked."""
    tree = config.model_dump(mode="json")
    for key, value in values.items():
        set_value(tree, key.split("."), value)
    return validate_config(type(config), tree)


def _draw(recipe: str, key: str, value: Any) -> Distribution:
    kinds: dict[str, type[Distribution]] = {"choice": Choice, "uniform": Uniform, "log": LogUniform}
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in kinds:
        raise RecipeError(
            f"recipe {recipe}: tuning of {key} must be one of choice: [...], uniform: [low, high], "
            f"log: [low, high] and fixed, got {value!r}"
        )
    try:
        return kinds[next(iter(value))].model_validate(value)
    except ValidationError as error:
        raise RecipeError(f"recipe {recipe}: tuning of {key}: {validation_message(error)}") from error
