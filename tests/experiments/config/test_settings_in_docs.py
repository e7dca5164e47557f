"""Every setting of the schema has a description, and the tables in the docs have a row for each."""

import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from comet_moe.experiments.config import BertConfig, TrainConfig
from comet_moe.experiments.config.gate_sections import GateConfig, MixtureGateConfig

DOCS = Path(__file__).parents[3] / "docs"
COMPARISONS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
PLURAL = {"integer": "integers", "number": "numbers"}
UNION_TAGS = ("name", "kind")
SHARED = {name: field for name, field in MixtureGateConfig.model_fields.items() if name != "name"}


def table_rows(section: type[BaseModel], prefix: str = "", only_for: str = "") -> list[str]:
    """One Markdown row per setting: name, default, range, meaning."""
    rows: list[str] = []
    for name, field in section.model_fields.items():
        if issubclass(section, MixtureGateConfig) and name in SHARED:
            continue  # listed once, after the settings of the single gates
        sections = [kind for kind in union_members(field.annotation) if is_section(kind)]
        if sections == [GateConfig]:
            sections = list(section.gate_sections())
        if len(sections) == 1:
            rows += table_rows(sections[0], f"{prefix}{name}.")
        elif sections:  # a section whose settings depend on its name or kind
            for kind in sections:
                rows += table_rows(kind, f"{prefix}{name}.", section_tag(kind))
            if any(issubclass(kind, MixtureGateConfig) for kind in sections):
                rows += [table_row(f"{prefix}{name}.{below}", field) for below, field in SHARED.items()]
        else:
            suffix = f" ({only_for})" if only_for and name not in UNION_TAGS else ""
            rows.append(table_row(f"{prefix}{name}", field, suffix))
    return rows


def table_row(name: str, field: FieldInfo, suffix: str = "") -> str:
    cells = (f"`{name}`{suffix}", default_text(field), range_text(field), field.description or None)
    return f"| {' | '.join(map(str, cells))} |"


def union_members(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return union_members(get_args(annotation)[0])
    return list(get_args(annotation)) if is_union(annotation) else [annotation]


def is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def section_tag(section: type[BaseModel]) -> str:
    (tag,) = [name for name in UNION_TAGS if name in section.model_fields]
    names = get_args(section.model_fields[tag].annotation)
    return str(names[0]) if names else "dense"  # whose name may have any width


def default_text(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "recipe"
    if default is None or isinstance(default, bool):
        return str({None: "null"}.get(default, str(default).lower()))
    if isinstance(default, tuple):
        return f"[{', '.join(f'{value:g}' for value in default)}]"
    return f"{default:g}" if isinstance(default, float) else str(default)


def range_text(field: FieldInfo) -> str:
    return type_text(field.annotation, field.metadata)


def type_text(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [item for part in arguments[1:] for item in getattr(part, "metadata", [part])]
        return type_text(arguments[0], [*inner, *metadata])
    if is_union(annotation):
        names = ["null" if kind is types.NoneType else type_text(kind, metadata) for kind in arguments]
        return ", or ".join(names)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        kind, *limits = type_text(arguments[0], []).split(" ", 1)
        count = "list of" if arguments[1] is ... else "two"
        return " ".join((count, PLURAL[kind], *limits))
    if annotation is bool:
        return "`true`, `false`"
    if annotation in (int, float):
        return f"{'integer' if annotation is int else 'number'} {limits_text(metadata)}".strip()
    return {str: "text", dict: "mapping"}[origin or annotation]


def limits_text(metadata: list[Any]) -> str:
    """The limits in pydantic's metadata; those of one object may be attributes of several."""
    limits = {
        name: getattr(item, name)
        for item in metadata
        for name in COMPARISONS
        if getattr(item, name, None) is not None
    }
    return " and ".join(f"{COMPARISONS[name]} {limit:g}" for name, limit in limits.items())


def rows_under(heading: str) -> list[str]:
    lines = (DOCS / "settings.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("| setting | default | range | meaning |", lines.index(f"## {heading}")) + 2
    return lines[start : lines.index("", start)] if "" in lines[start:] else lines[start:]


def expected_rows() -> dict[str, list[str]]:
    networks, bert = table_rows(TrainConfig), table_rows(BertConfig)
    return {
        "Gates, search and training": [row for row in networks if row in bert],
        "Networks": [row for row in networks if row not in bert],
        "COMET-BERT": [row for row in bert if row not in networks],
    }


@pytest.mark.parametrize("heading", expected_rows())
def test_a_table_has_every_setting_once_with_its_default_range_and_meaning(heading):
    expected = expected_rows()[heading]
    assert rows_under(heading) == expected, f"under {heading} should be:\n" + "\n".join(expected)


@pytest.mark.parametrize("config", [TrainConfig, BertConfig])
def test_every_setting_has_a_description(config):
    assert not [row for row in table_rows(config) if row.endswith("| None |")]
