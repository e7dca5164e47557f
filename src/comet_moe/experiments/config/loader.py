"""Builds a validated configuration from a recipe and the settings given on the command line.

A recipe is YAML. Its ``gates`` section has the settings of every gate in this experiment, and ``gate`` is the
name of the one to use. The settings of ``comet+`` override those of ``comet``, and so on for every gate with
``+``. The ``tuning`` section is read by :mod:`comet_moe.experiments.config.search_space`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError

from comet_moe.exceptions import RecipeError
from comet_moe.experiments.config.bert_schema import BertConfig
from comet_moe.experiments.config.gate_sections import GateConfig, GatedConfig
from comet_moe.experiments.config.schema import TrainConfig
from comet_moe.experiments.config.values import ConfigSection, SettingText, read_mapping_or_text, read_yaml
from comet_moe.files import field_name, read_text
from comet_moe.gates.registry import find_gate, gate_names, is_dense, is_gate_name, unknown_gate

AnyConfig = TrainConfig | BertConfig
ConfigType = TypeVar("ConfigType", bound=ConfigSection)
Override = tuple[list[str], Any]
"""The keys of a setting, ``["a", "b"]`` for "a.b", and its value."""


def list_recipes() -> list[str]:
    """The names of the recipes that are part of this package."""
    return sorted(_packaged_recipes())


def load_config(recipe: str, settings: Sequence[str] = ()) -> AnyConfig:
    """The configuration of ``recipe``, a name or a path, overridden by ``settings`` of the form "a.b=c"."""
    return build_config(_read_settings(recipe), [parse_setting(setting) for setting in settings], recipe)


def load_train_config(recipe: str, settings: Sequence[str] = ()) -> TrainConfig:
    """Like :func:`load_config`, for a recipe of ``comet-moe train``."""
    config = load_config(recipe, settings)
    if not isinstance(config, TrainConfig):
        raise RecipeError(f"recipe {recipe} is for COMET-BERT: use `comet-moe bert`")
    return config


def load_bert_config(recipe: str, overrides: Sequence[Override] = ()) -> BertConfig:
    """Like :func:`load_config`, for a recipe of ``comet-moe bert``."""
    config = build_config(_read_settings(recipe), overrides, recipe)
    if not isinstance(config, BertConfig):
        raise RecipeError(f"recipe {recipe} is not for COMET-BERT, as it has no task: use `comet-moe train`")
    return config


def build_config(
    settings: dict[str, Any], overrides: Sequence[Override], source: str | None = None
) -> AnyConfig:
    """``settings``, changed by ``overrides``, as a configuration: of COMET-BERT if there is a ``task``.

    Where ``gate`` is a name, its settings come from ``gates``. COMET-BERT keeps ``gates``, since students of
    one teacher may have different gates.

    Args:
        settings: nested dictionaries, one per section; they are changed.
        overrides: settings to change, in any order; if one is given twice, the last counts.
        source: the recipe's name or path, for error messages.
    """
    kind: type[AnyConfig] = BertConfig if "task" in settings else TrainConfig
    gate_overrides = [override for override in overrides if _chooses_gate(override[0])]
    for keys, value in gate_overrides:
        set_value(settings, keys, value)
    gates = _check_gates(settings.get("gates", {}))
    if kind is TrainConfig:
        settings.pop("gates", None)
    gate = settings.get("gate")
    if not isinstance(gate, Mapping):
        settings["gate"] = _gate_settings(gate, gates)
    elif not any(keys == ["gate"] for keys, _ in overrides):  # of a saved configuration
        settings["gate"] = {**gate, **_given_for(str(gate.get("name")), gates, overrides)}
    for keys, value in overrides:
        if not _chooses_gate(keys):
            set_value(settings, keys, value)
    return validate_config(kind, settings, source)


def validate_config(
    kind: type[ConfigType], settings: Mapping[str, Any], source: str | None = None
) -> ConfigType:
    """``settings`` as a configuration of type ``kind``; ``source`` is the recipe's name or path."""
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        message = validation_message(error, settings)
        raise RecipeError(f"recipe {source or settings['recipe']}: {message}") from error


def override_config(config: ConfigType, values: Mapping[str, Any]) -> ConfigType:
    """``config`` with other ``values``, by keys such as "gate.gamma"; the result is validated."""
    settings = config.model_dump(mode="json")
    for key, value in values.items():
        set_value(settings, key.split("."), value)
    return validate_config(type(config), settings)


def resolve_gates(recipe: str, gate: str, overrides: Sequence[Override]) -> list[Override]:
    """``overrides`` with those in ``gates`` replaced by the settings of ``gate`` that they change.

    "gates.comet.k" becomes "gate.k" for ``comet``, and for ``comet+`` unless it has a k of its own. What is
    given for other gates is left out.
    """
    settings = {"gates": read_recipe(recipe).get("gates", {})}
    for keys, value in overrides:
        if keys[0] == "gates":
            set_value(settings, keys, value)
    values = _given_for(gate, _check_gates(settings["gates"]), overrides)
    others = [override for override in overrides if override[0][0] != "gates"]
    return [*((["gate", name], value) for name, value in values.items()), *others]


def check_same_settings(saved: AnyConfig, recipe: str, overrides: Sequence[Override]) -> None:
    """Refuse settings that differ from ``saved``, the configuration of the run to resume.

    ``recipe`` is a name as in a configuration; ``overrides`` of ``train`` are those of :func:`resolve_gates`.
    """
    given = {".".join(keys): (keys, value) for keys, value in overrides}
    saved_names = {"recipe": saved.recipe, "gate": saved.gate.name}
    given_names = saved_names | {"recipe": recipe}
    if "gate" in given and not isinstance(given["gate"][1], Mapping):
        given_names["gate"] = given.pop("gate")[1]
    change = first_change(saved_names, given_names)
    if change is None:
        asked = build_config(saved.model_dump(mode="json"), list(given.values()))
        change = first_change(saved.model_dump(mode="json"), asked.model_dump(mode="json"))
    if change is not None:
        key, old, new = change
        raise RecipeError(
            f"{key} is {old!r} in the saved run, got {new!r}: leave it out, or name another --out"
        )


def first_change(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first key whose value differs, as "a.b" where nested, and its two values; None if all agree."""
    for key in before | after:
        old, new = before.get(key), after.get(key)
        if old != new:
            if not (isinstance(old, dict) and isinstance(new, dict)):
                return key, old, new
            nested = first_change(old, new)
            if nested is not None:  # else one has a key whose value is None and the other lacks it
                return f"{key}.{nested[0]}", *nested[1:]
    return None


def recipe_name(recipe: str) -> str:
    """The name of ``recipe``, a name or a path, as in its configurations."""
    return str(_read_settings(recipe)["recipe"])


def read_recipe(recipe: str) -> dict[str, Any]:
    """The content of ``recipe``, a name or a path, not validated."""
    packaged = _packaged_recipes()
    if recipe in packaged:
        text = packaged[recipe].read_text(encoding="utf-8")
    elif recipe.endswith((".yaml", ".yml")) or Path(recipe).exists():
        text = read_text(Path(recipe), RecipeError, "give a YAML file")
    else:
        raise RecipeError(
            f"there is no recipe {recipe!r}: "
            f"give a path to a YAML file, or one of {', '.join(sorted(packaged))}"
        )
    try:
        content = read_yaml(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe {recipe} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"recipe {recipe} must be a mapping of settings, got {type(content).__name__}")
    unnamed = next((key for key in content if not isinstance(key, str)), None)
    if unnamed is not None:
        raise RecipeError(f"recipe {recipe} has {unnamed!r} where the name of a setting is due")
    return content


def parse_setting(setting: str) -> Override:
    """The keys and the value of a setting such as "a.b=c".

    The value is text until the schema reads it by the setting's type (``config/values.py``). Only ``gate``,
    ``gates`` and ``gates.NAME`` are read here: a name, or a mapping of settings.
    """
    name, equals, text = setting.partition("=")
    keys = name.split(".")
    if not equals or not all(keys):
        raise RecipeError(f"a setting has the form a.b=c, got {setting!r}")
    if keys[0] == "recipe":
        raise RecipeError(
            f"recipe is the argument of the command and no setting, got {setting!r}: leave it out"
        )
    if _chooses_gate(keys) and len(keys) < 3:
        return keys, read_mapping_or_text(text)
    return keys, SettingText(text)


def set_value(settings: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set the value of the setting ``keys`` in nested dictionaries, which are created as needed."""
    for key in keys[:-1]:
        section = settings.setdefault(key, {})
        if isinstance(section, SettingText):
            section = settings[key] = read_mapping_or_text(section)
        if not isinstance(section, dict):
            raise RecipeError(f"{'.'.join(keys)} cannot be set: {key} is {section!r}, not a section")
        settings = section
    settings[keys[-1]] = value


def validation_message(error: ValidationError, settings: Mapping[str, Any] | None = None) -> str:
    """The first problem in one sentence: the setting, what is wrong with it, the value.

    ``settings`` are what was validated: their gate and kind of model have settings of their own.
    """
    problem = error.errors(include_url=False)[0]
    key = field_name(part for part in problem["loc"] if part not in _MODEL_KINDS)
    context = problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden":
            return _no_such_setting(key, settings or {})
        case "missing":
            return f"the setting {key} is missing"
        case "union_tag_not_found":
            return f"the setting {key}.kind is missing"
        case "union_tag_invalid":
            return f"{key}.kind must be one of {context['expected_tags']}, got {context['tag']!r}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":  # raised by a validator of ours, whose message names the value
        return message if not key or message.startswith(key) else f"{key}: {message}"
    return f"{key}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"


_MODEL_KINDS = {
    kind
    for section in get_args(TrainConfig.model_fields["model"].annotation)
    for kind in get_args(section.model_fields["kind"].annotation)
}
"""What pydantic adds to the path of a setting of ``model`` to say which member of the union it is in."""


def _no_such_setting(key: str, settings: Mapping[str, Any]) -> str:
    """What is wrong with ``key``, which this gate or kind of model does not have, but another one may."""
    names = {name for kind in (TrainConfig, BertConfig) for name in _setting_names(kind)}
    section, _, name = key.partition(".")
    if key in names and section in ("gate", "model"):
        member = settings[section]["name" if section == "gate" else "kind"]
        return f"the {section} {member} has no setting {name}"
    near = get_close_matches(key, names, n=1, cutoff=0.85)
    return f"there is no setting {key}" + (f", did you mean {near[0]}?" if near else "")


def _setting_names(section: type[ConfigSection], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        kinds: Iterable[Any] = (field.annotation, *get_args(field.annotation))
        if field.annotation is GateConfig and issubclass(section, GatedConfig):
            kinds = section.gate_sections()
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, ConfigSection):
                yield from _setting_names(kind, f"{prefix}{name}.")


def _read_settings(recipe: str) -> dict[str, Any]:
    """The settings of ``recipe``, with its name and without its search space."""
    content = read_recipe(recipe)
    content.pop("tuning", None)
    return {"recipe": Path(recipe).stem, **content}


def _packaged_recipes() -> dict[str, Any]:
    paths = files("comet_moe.experiments").joinpath("recipes").iterdir()
    return {path.name.removesuffix(".yaml"): path for path in paths if path.name.endswith(".yaml")}


def _chooses_gate(keys: Sequence[str]) -> bool:
    """Whether a setting is ``gate`` or in ``gates``: those are applied before the settings of the gate."""
    return keys[0] == "gates" or list(keys) == ["gate"]


def _check_gates(gates: Any) -> Mapping[str, Mapping[str, Any]]:
    """``gates`` of a recipe: a mapping from gate names to mappings of settings."""
    if not isinstance(gates, Mapping):
        raise RecipeError(f"gates must be a mapping of gate names to their settings, got {gates!r}")
    for name, settings in gates.items():
        if not is_gate_name(name):
            raise RecipeError(f"there is no setting gates.{name}: gates are {', '.join(gate_names())}")
        if settings is not None and not isinstance(settings, Mapping):
            raise RecipeError(f"gates.{name} must be a mapping of settings, got {settings!r}")
    return gates


def _gate_settings(name: Any, gates: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the gate ``name``; those of a name with ``+`` override those of the name without."""
    if not is_gate_name(name):
        raise RecipeError(unknown_gate(name))
    kind = name.removesuffix("+")
    return {**_common_k(kind, gates), **(gates.get(kind) or {}), **(gates.get(name) or {}), "name": name}


def _common_k(kind: str, gates: Mapping[str, Any]) -> dict[str, Any]:
    """The k of ``topk``, or else of ``comet``, for kinds whose own k the recipe does not give."""
    given = next((gates[name]["k"] for name in ("topk", "comet") if "k" in (gates.get(name) or {})), None)
    has_k = given is not None and (is_dense(kind) or "k" in find_gate(kind).settings)
    return {"k": given} if has_k else {}


def _given_for(gate: str, gates: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """The settings of ``gate`` that ``overrides`` change in ``gates``, which has them already."""
    given: dict[str, Any] = {"gates": {}}
    for keys, value in overrides:
        if keys[0] == "gates":
            set_value(given, keys, value)
    kind = gate.removesuffix("+")
    own = gates.get(gate) or {} if gate != kind else {}
    shared = {name: value for name, value in (given["gates"].get(kind) or {}).items() if name not in own}
    return shared | dict(given["gates"].get(gate) or {})
