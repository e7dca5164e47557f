"""From a recipe's name or file, and settings from the command line, to a checked configuration.

A recipe is YAML. Its ``gates`` section has the settings of each gate in this experiment, its ``gate`` the one
that is used; ``gates`` of a name with ``+`` are laid over those without. Its ``tuning`` section is read by
:mod:`comet_moe.config.search_space`.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from comet_moe.config.bert_schema import BertConfig
from comet_moe.config.schema import GATE_NAMES, Section, TrainConfig
from comet_moe.exceptions import RecipeError

AnyConfig = TrainConfig | BertConfig
ConfigType = TypeVar("ConfigType", bound=Section)
Override = tuple[list[str], Any]
"""The keys of a setting and its value."""


def list_recipes() -> list[str]:
    """The recipes that are shipped."""
    return sorted(path.name.removesuffix(".yaml") for path in _shipped() if path.name.endswith(".yaml"))


def load_config(recipe: str, settings: Sequence[str] = ()) -> AnyConfig:
    """The configuration of ``recipe``, a name or a path, with ``settings`` of the form "a.b=c" laid over."""
    return build_config(_tree(recipe), [parse_setting(setting) for setting in settings], recipe)


def load_train_config(recipe: str, settings: Sequence[str] = ()) -> TrainConfig:
    """As :func:`load_config`, of a network that ``comet-moe train`` trains."""
    found = load_config(recipe, settings)
    if not isinstance(found, TrainConfig):
        raise RecipeError(f"recipe {recipe} is of COMET-BERT: see `comet-moe bert --help`")
    return found


def load_bert_config(recipe: str, overrides: Sequence[Override] = ()) -> BertConfig:
    """As :func:`load_config`, of COMET-BERT."""
    found = build_config(_tree(recipe), overrides, recipe)
    if not isinstance(found, BertConfig):
        raise RecipeError(f"recipe {recipe} is not of COMET-BERT (it has no task): use `comet-moe train`")
    return found


def _tree(recipe: str) -> dict[str, Any]:
    tree = read_recipe(recipe)
    tree.pop("tuning", None)
    return {"recipe": Path(recipe).stem, **tree}


def build_config(tree: dict[str, Any], overrides: Sequence[Override], source: str | None = None) -> AnyConfig:
    """``tree`` with ``overrides`` laid over, checked; a gate's name stands for its settings in ``gates``.

    What has a ``task`` is of COMET-BERT, which keeps ``gates``: students may have another gate. ``source`` is
    where it was read.
    """
    kind: type[AnyConfig] = BertConfig if "task" in tree else TrainConfig
    first = [override for override in overrides if override[0][0] == "gates" or override[0] == ["gate"]]
    for keys, value in first:
        set_value(tree, keys, value)
    gates = tree.get("gates", {}) if kind is BertConfig else tree.pop("gates", {})
    if not isinstance(tree.get("gate"), Mapping):
        tree["gate"] = gate_settings(tree.get("gate"), gates)
    for keys, value in overrides:
        if (keys, value) not in first:
            set_value(tree, keys, value)
    return validate_config(kind, tree, source)


def validate_config(kind: type[ConfigType], tree: dict[str, Any], source: str | None = None) -> ConfigType:
    """``tree`` as a configuration; ``source`` is where it was read."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(f"recipe {source or tree['recipe']}: {validation_message(error)}") from error


def check_same_settings(saved: AnyConfig, recipe: str, overrides: Sequence[Override]) -> None:
    """Refuse what differs from ``saved``, the configuration of a run to go on with.

    Args:
        saved: what is not given is as it was saved.
        recipe: its name, as in a configuration.
        overrides: what is given.
    """
    last = {".".join(keys): (keys, value) for keys, value in overrides}
    names = {"recipe": saved.recipe, "gate": saved.gate.name}
    asked_names = names | {"recipe": recipe}
    if "gate" in last and not isinstance(last["gate"][1], Mapping):
        asked_names["gate"] = last.pop("gate")[1]
    change = first_change(names, asked_names)
    if change is None:
        asked = build_config(saved.model_dump(mode="json"), list(last.values()))
        change = first_change(saved.model_dump(mode="json"), asked.model_dump(mode="json"))
    if change is not None:
        key, old, new = change
        raise RecipeError(
            f"{key} is {old!r} in the saved run, got {new!r}: leave it out, or name another --out"
        )


def first_change(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first key, in nested dictionaries with dots, whose value differs, and the two values."""
    for key in before | now:
        old, new = before.get(key), now.get(key)
        if old != new:
            if not (isinstance(old, dict) and isinstance(new, dict)):
                return key, old, new
            below = first_change(old, new)
            if below is not None:  # else they differ in a key without a value
                return f"{key}.{below[0]}", *below[1:]
    return None


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
    return [path for path in files("comet_moe").joinpath("recipes").iterdir() if path.name.endswith(".yaml")]


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


def set_value(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set the value under ``keys``, making sections as needed."""
    for key in keys[:-1]:
        below = tree.setdefault(key, {})
        if not isinstance(below, dict):
            raise RecipeError(f"{'.'.join(keys)} cannot be set: {key} is {below!r}, not a section")
        tree = below
    tree[keys[-1]] = value


def validation_message(error: ValidationError) -> str:
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
