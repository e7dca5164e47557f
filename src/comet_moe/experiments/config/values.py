"""Reads values that are given as text, as in ``--set a.b=c``, by the type of their setting in the schema.

A text setting takes the text as it is, so that a folder may be named 2024. Every other setting, and those in
free-form mappings such as ``data.options``, take it as YAML; there 1e-4 is a number, nan and inf are text.
"""

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from comet_moe.exceptions import RecipeError
from comet_moe.experiments.config.yaml_text import read_yaml


class SettingText(str):
    """The value of a setting as it was typed, not read yet because its type is not known yet."""

    __slots__ = ()

    @property
    def is_null(self) -> bool:
        """Whether it unsets a text setting that may be unset: "null", or nothing."""
        return self in ("", "null")


def read_value(text: SettingText, annotation: Any) -> Any:
    """The value of ``text`` for a setting of the type ``annotation``.

    What does not fit the type is returned as it is: the schema's own error names the setting.

    >>> read_value(SettingText("2024"), str), read_value(SettingText("2024"), int | None)
    ('2024', 2024)
    """
    kinds = _value_types(annotation)
    if str in kinds:
        return None if text.is_null and types.NoneType in kinds else str(text)
    try:
        value = read_yaml(text)
    except yaml.YAMLError:
        return str(text)
    if isinstance(value, bool) and bool not in kinds:  # pydantic takes True for 1
        return str(text)
    return value


def read_section(values: Mapping[str, Any], annotations: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` of a section with each text read by the type of its setting.

    Args:
        values: the value of each setting; those that are not :class:`SettingText` are kept.
        annotations: the type of each setting of the section.
    """
    read: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, SettingText) and name in annotations:
            value = read_value(value, annotations[name])
        elif isinstance(value, Mapping) and dict in _value_types(annotations.get(name)):
            value = {key: read_free_form(below, f"{name}.{key}") for key, below in value.items()}
        read[name] = value
    return read


def read_free_form(value: Any, name: str) -> Any:
    """``value`` of the setting ``name``, which has no type of its own, with each text read as YAML."""
    if isinstance(value, Mapping):
        return {key: read_free_form(below, f"{name}.{key}") for key, below in value.items()}
    if not isinstance(value, SettingText):
        return value
    try:
        return read_yaml(value)
    except yaml.YAMLError as error:
        raise RecipeError(f"the value of {name} must be YAML, got {str(value)!r}") from error


def read_mapping_or_text(text: str) -> Any:
    """A mapping where ``text`` is one in YAML, else ``text`` itself."""
    try:
        value = read_yaml(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, Mapping) else text


def _value_types(annotation: Any) -> set[type]:
    """The types that a value may have: of a union its members, of a literal those of its values."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _value_types(get_args(annotation)[0])
    if origin is Literal:
        return {type(value) for value in get_args(annotation)}
    if origin in (Union, types.UnionType):
        return set().union(*(_value_types(member) for member in get_args(annotation)))
    return {origin or annotation}
