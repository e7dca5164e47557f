"""The search space of a recipe: the distribution of each setting that tuning samples, per gate.

A recipe's ``tuning`` section maps settings to distributions. Those under ``all`` are for every gate, those
under ``search`` for gates whose name ends in ``+``, those under a gate's name for that gate. ``comet+``
overrides ``comet``, and so on. ``fixed`` instead of a distribution keeps the recipe's value.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PositiveFloat, ValidationError

from comet_moe.exceptions import RecipeError
from comet_moe.experiments.config.loader import parse_setting, read_recipe, resolve_gates, validation_message
from comet_moe.experiments.config.values import ConfigSection
from comet_moe.gates.registry import gate_names


class Choice(ConfigSection):
    """One of several values, all equally likely."""

    choice: Annotated[tuple[bool | int | float | str, ...], Field(min_length=1)]


def _check_range(ends: tuple[float, float]) -> tuple[float, float]:
    low, high = ends
    if not low < high:
        raise ValueError(f"the low end of a range must be below the high end, got [{low}, {high}]")
    return ends


class Uniform(ConfigSection):
    """A number between two, uniformly distributed."""

    uniform: Annotated[tuple[float, float], AfterValidator(_check_range)]


class LogUniform(ConfigSection):
    """A positive number between two, whose logarithm is uniformly distributed."""

    log: Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(_check_range)]


Distribution = Choice | Uniform | LogUniform
SearchSpace = dict[str, Distribution]

_FOR_SEVERAL_GATES = ("all", "search")


def load_search_space(recipe: str, gate: str, settings: Sequence[str] = ()) -> SearchSpace:
    """The distributions for ``gate``, in the order of the recipe, without those that ``settings`` set."""
    section = read_recipe(recipe).get("tuning")
    if section is None:
        raise RecipeError(f"recipe {recipe} has no tuning section: add one, or use a recipe that has one")
    if not isinstance(section, Mapping):
        raise RecipeError(f"recipe {recipe}: tuning must be a mapping of settings, got {section!r}")
    unknown = sorted(set(section) - set(gate_names()) - set(_FOR_SEVERAL_GATES))
    if unknown:
        raise RecipeError(f"recipe {recipe}: there is no setting tuning.{unknown[0]}")
    names = ["all", *(["search"] if gate.endswith("+") else []), gate.removesuffix("+"), gate]
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(names):
        part = section.get(name) or {}
        if not isinstance(part, Mapping) or not all(isinstance(key, str) for key in part):
            raise RecipeError(f"recipe {recipe}: tuning.{name} must be a mapping of settings, got {part!r}")
        if "seed" in part:
            raise RecipeError(f"recipe {recipe}: tuning.{name}.seed cannot be tuned: each trial has its own")
        merged |= part
    overrides = resolve_gates(recipe, gate, [parse_setting(setting) for setting in settings])
    given = [".".join(keys) for keys, _ in overrides]
    return {
        key: _parse_distribution(recipe, key, value)
        for key, value in merged.items()
        if value != "fixed" and not any(key == name or key.startswith(f"{name}.") for name in given)
    }


def _parse_distribution(recipe: str, key: str, value: Any) -> Distribution:
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
