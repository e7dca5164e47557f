"""The base class of all sections of a configuration, and their values: YAML, read by the type of the setting.

YAML has numbers, texts, lists and mappings here: no tags, dates or octal numbers, and few aliases.

In ``--set a.b=c`` a text setting takes the text as it is, so that a folder may be named 2024. Every other
setting, and those in free-form mappings such as ``data.options``, take it as YAML. There 1e-4 is a number,
nan and inf are text.
"""

import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from comet_moe.exceptions import RecipeError

MAX_ALIASES = 50
MAX_DEPTH = 100
"""Most aliases of a file: those of aliases multiply."""

_INT, _FLOAT, _TIME = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp"))
_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOATS = re.compile(
    r"""[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[0-9][0-9_]*[eE][-+]?[0-9]+
        |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
        |\.(?:inf|Inf|INF))
        |\.(?:nan|NaN|NAN)""",
    re.VERBOSE,
)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4 as text, YAML 1.2 as a number; so does this. Dates, 0x10 and 1:30 are text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As in YAML, where a key is given once."""
        keys = [key.value for key, _ in node.value]
        mapping = super().construct_mapping(node, deep)
        repeated = next((key for key in keys if keys.count(key) > 1), None)
        if repeated is not None:
            raise yaml.YAMLError(f"the key {repeated!r} is given twice")
        return mapping


_Loader.yaml_implicit_resolvers = {  # without timestamps, and with numbers as below
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT, _TIME)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(rf"^(?:{_NUMBER.pattern})$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT, re.compile(rf"^(?:{_FLOATS.pattern})$", re.VERBOSE), list("-+.0123456789")
)


def _integer(loader: yaml.SafeLoader, node: Any) -> int:
    return int(loader.construct_scalar(node).replace("_", ""))


_Loader.add_constructor(_INT, _integer)


def read_yaml(text: str) -> Any:
    """The value that ``text`` has as YAML; raises yaml.YAMLError for what is not YAML or beyond the limits.

    >>> read_yaml("[1e-3, 1_000, nan, no, 2024-01-31]")
    [0.001, 1000, 'nan', False, '2024-01-31']
    """
    aliases = depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            aliases += isinstance(event, yaml.AliasEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if aliases > MAX_ALIASES:
                raise yaml.YAMLError(f"it has more than {MAX_ALIASES} aliases")
            if depth > MAX_DEPTH:  # reading on takes a time that grows with the square of the depth
                raise yaml.YAMLError("it is nested too deeply")
            if getattr(event, "tag", None) is not None:
                raise yaml.YAMLError(f"the tag {event.tag} is not allowed")
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else loader.construct_object(node, deep=True)  # refuses a loop of aliases
    except yaml.YAMLError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise yaml.YAMLError(str(error)) from error


def _check_switch(value: Any) -> bool:
    """Pydantic takes 1 and "yes" for True."""
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {value!r}")
    return value


Switch = Annotated[bool, BeforeValidator(_check_switch)]
"""A setting that is true or false, and no number."""


class SettingText(str):
    """The value of a setting as it was typed, not read yet because its type is not known yet."""

    __slots__ = ()


def read_value(text: SettingText, annotation: Any) -> Any:
    """The value of ``text`` for a setting of the type ``annotation``.

    What does not fit the type is returned as it is: the schema's own error names the setting.

    >>> read_value(SettingText("2024"), str), read_value(SettingText("2024"), int | None)
    ('2024', 2024)
    """
    kinds = _value_types(annotation)
    if str in kinds:
        return None if text in ("", "null") and types.NoneType in kinds else str(text)
    try:
        value = read_yaml(text)
    except yaml.YAMLError:
        return str(text)
    if isinstance(value, bool) and bool not in kinds:  # pydantic takes True for 1
        return str(text)
    return value


def read_section(values: Mapping[str, Any], annotations: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` of a section with each :class:`SettingText` read by the type of its setting."""
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


class ConfigSection(BaseModel):
    """Base class of all sections: no unknown settings, no NaN or infinity, text read by its type."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return read_section(values, {name: field.annotation for name, field in cls.model_fields.items()})


Size = Annotated[int, Field(gt=0, le=10**6)]
"""Number of experts, features, units: what tensors are made of."""

Sizes = Annotated[tuple[Size, ...], Field(max_length=64)]
Count = Annotated[int, Field(gt=0, le=10**9)]
"""Number of epochs or rows: what takes time."""

Seed = Annotated[int, Field(ge=0, le=10**15)]
Iterations = Annotated[int, Field(gt=0, le=100_000)]
Threads = Annotated[int, Field(gt=0, le=1024)]

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
PrecisionName = Literal["float32", "bfloat16", "float16"]
DEVICE: Any = Field(
    default="auto",
    description="where the model is trained; `auto`: an accelerator if there is one, and config.yaml has it",
)
PRECISION: Any = Field(
    default="float32", description="of the products of experts and heads; `float16` is for CUDA only"
)
