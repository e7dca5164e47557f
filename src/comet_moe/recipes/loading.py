"""From a recipe's name or file, and settings from the command line, to a checked configuration.

A recipe is YAML. Its ``gates`` section has the settings of each gate in this experiment, its ``gate`` the one
that is used; ``gates`` of a name with ``+`` are laid over those without. Its ``tuning`` section is read by
:mod:`comet_moe.recipes.space`.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from comet_moe.recipes.schema import GATE_NAMES, Config, absolute


class RecipeError(ValueError):
    """A recipe or a setting that cannot be used; the message says which and why."""


def recipe_names() -> list[str]:
    """The recipes that are shipped."""
    return sorted(path.name.removesuffix(".yaml") for path in _shipped() if path.name.endswith(".yaml"))


def load_recipe(recipe: str, settings: Sequence[str] = ()) -> Config:
    """The configuration of ``recipe``, a name or a path, with ``settings`` of the form "a.b=c" laid over."""
    tree = read_recipe(recipe)
    overrides = [parse_setting(setting) for setting in settings]
    gates = tree.pop("gates", {})
    tree.pop("tuning", None)
    for keys, value in overrides:
        if keys == ["gate"]:
            tree["gate"] = value
    if not isinstance(tree.get("gate"), Mapping):
        tree["gate"] = gate_settings(tree.get("gate"), gates)
    for keys, value in overrides:
        if keys != ["gate"]:
            put(tree, keys, value)
    tree.setdefault("recipe", Path(recipe).stem)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(f"recipe {recipe}: {first_problem(error)}") from error


def check_agreement(saved: Config, recipe: str, settings: Sequence[str]) -> None:
    """Refuse a recipe or a setting that differs from ``saved``, the configuration of a run to go on with.

    What is not set is as it was saved.
    """
    asked = load_recipe(recipe).recipe
    if asked != saved.recipe:
        raise RecipeError(f"recipe is {saved.recipe!r} in the saved run, got {asked!r}: name another --out")
    tree = saved.model_dump(mode="json")
    last = {".".join(keys): (keys, value) for keys, value in map(parse_setting, settings)}
    for name, (keys, value) in last.items():
        if keys == ["data", "path"] and value is not None:
            value = absolute(value)
        found: Any = saved.gate.name if keys == ["gate"] else _value(tree, keys)
        if found != value:
            raise RecipeError(
                f"{name} is {found!r} in the saved run, got {value!r}: leave it out, or name another --out"
            )


def _value(tree: Any, keys: Sequence[str]) -> Any:
    for depth, key in enumerate(keys):
        if not isinstance(tree, dict) or (key not in tree and keys[:2] != ["data", "options"]):
            raise RecipeError(f"there is no setting {'.'.join(keys[: depth + 1])}")
        tree = tree.get(key)
    return tree


def gate_settings(name: Any, gates: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the gate ``name`` in a recipe's ``gates``."""
    if name not in GATE_NAMES:
        raise RecipeError(f"gate must be one of {', '.join(GATE_NAMES)}, got {name!r}")
    own = gates.get(name) or {}
    return {**(gates.get(name.removesuffix("+")) or {}), **own, "name": name}


def read_recipe(recipe: str) -> dict[str, Any]:
    """The settings of ``recipe``, a name or a path, as they are written."""
    shipped = {path.name.removesuffix(".yaml"): path for path in _shipped()}
    if recipe in shipped:
        text = shipped[recipe].read_text(encoding="utf-8")
    elif recipe.endswith((".yaml", ".yml")) or Path(recipe).exists():
        try:
            text = Path(recipe).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"recipe {recipe} cannot be read: {error}") from error
    else:
        raise RecipeError(
            f"there is no recipe {recipe!r}: "
            f"give a path to a YAML file, or one of {', '.join(sorted(shipped))}"
        )
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe {recipe} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise RecipeError(f"recipe {recipe} must be a mapping of settings, got {type(tree).__name__}")
    return tree


def _shipped() -> list[Any]:
    return [path for path in files("comet_moe.recipes").iterdir() if path.name.endswith(".yaml")]


def parse_setting(setting: str) -> tuple[list[str], Any]:
    """The keys and the value of a setting such as "a.b=c"; the value is read as YAML."""
    name, equals, value = setting.partition("=")
    if not equals or not name:
        raise RecipeError(f"a setting has the form a.b=c, got {setting!r}")
    try:
        return name.split("."), _number(yaml.safe_load(value))
    except yaml.YAMLError as error:
        raise RecipeError(f"the value of {name} is not YAML: {value!r}") from error


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 as text; everyone who types it means a number."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def put(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set the value under ``keys``, making sections as needed."""
    for key in keys[:-1]:
        below = tree.setdefault(key, {})
        if not isinstance(below, dict):
            raise RecipeError(f"{'.'.join(keys)} cannot be set: {key} is {below!r}, not a section")
        tree = below
    tree[keys[-1]] = value


def first_problem(error: ValidationError) -> str:
    """The first problem in one sentence: the key, what is wrong, what was given."""
    problem = error.errors(include_url=False)[0]
    tags = set(GATE_NAMES) | {"rating", "image"}
    key = ".".join(str(part) for part in problem["loc"] if part not in tags)
    if problem["type"] == "extra_forbidden":
        return f"there is no setting {key}"
    if problem["type"] == "missing":
        return f"the setting {key} is missing"
    said = problem["msg"].removeprefix("Value error, ")
    if not key:
        return said
    return f"{key}: {said[0].lower()}{said[1:]}, got {problem['input']!r}"
