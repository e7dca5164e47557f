"""The setup of a study: settings, search space, data set and environment.

Values that all gates share are listed once.
"""

import json
from dataclasses import dataclass
from typing import Any

from comet_moe.experiments.report.data import Run
from comet_moe.experiments.report.format import MISSING, format_integer
from comet_moe.experiments.studies.reading import Study

Mapping = dict[str, Any]


@dataclass(frozen=True)
class SettingTable:
    """A table of texts; the first column has the names of the rows."""

    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Comparison:
    """Values by gate: ``different`` has a column per gate, ``shared`` a name and the value of all gates."""

    title: str
    different: SettingTable
    shared: list[tuple[str, str]]


@dataclass(frozen=True)
class Dataset:
    """A data set: its facts, each with one or several lines of text, and its source files."""

    facts: list[tuple[str, list[str]]]
    sources: SettingTable


@dataclass(frozen=True)
class Settings:
    """What settings.html shows."""

    recipe: str
    overrides: list[str]
    runs: list[tuple[str, str, list[str]]]
    settings: Comparison
    space: SettingTable
    dataset: Dataset
    environment: Comparison


def build_settings(study: Study, runs: dict[str, Run]) -> Settings | None:
    """Settings of ``study`` and of the best ``runs`` of its gates; None if there are none."""
    if not (study.settings or runs or any(study.space.values())):
        return None
    configs = {gate: flatten(run.config) for gate, run in runs.items()}
    environments = {gate: _environment(run) for gate, run in runs.items()}
    return Settings(
        recipe=study.recipe,
        overrides=study.settings,
        runs=[_run_row(gate, run) for gate, run in runs.items()],
        settings=_compare("Settings of the best runs", configs),
        space=_search_space(study),
        dataset=_dataset(next(iter(runs.values())).dataset if runs else {}),
        environment=_compare("Environment", environments),
    )


def flatten(nested: Mapping, prefix: str = "") -> Mapping:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    flat: Mapping = {}
    for name, value in nested.items():
        is_nested = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{name}.") if is_nested else {prefix + name: value}
    return flat


def format_value(value: Any) -> str:
    """A value as ``--set`` takes it, a float with six digits."""
    if value is None:
        return "unset"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _environment(run: Run) -> Mapping:
    """Environment at the start, and its changes when the run was resumed."""
    values: dict[str, list[Any]] = {}
    for environment in run.environments:
        for name, value in environment.items():
            if name != "from_epoch" and value not in values.setdefault(name, []):
                values[name].append(value)
    return {name: ", then ".join(map(format_value, of_name)) for name, of_name in values.items()}


def _run_row(gate: str, run: Run) -> tuple[str, str, list[str]]:
    """Gate, folder, and best epoch, epochs, parameters and seconds."""
    numbers = [run.trial[name] for name in ("best_epoch", "epochs", "parameters", "seconds")]
    return gate, run.path.name, list(map(format_integer, numbers))


def _compare(title: str, by_gate: dict[str, Mapping]) -> Comparison:
    names = list(dict.fromkeys(name for mapping in by_gate.values() for name in mapping))
    texts = {
        name: [format_value(mapping[name]) if name in mapping else MISSING for mapping in by_gate.values()]
        for name in names
    }
    shared = [name for name in names if len(set(texts[name])) == 1]
    different = [name for name in names if name not in shared]
    return Comparison(
        title,
        SettingTable(["setting", *by_gate], [[name, *texts[name]] for name in different]),
        [(name, texts[name][0]) for name in shared],
    )


def _search_space(study: Study) -> SettingTable:
    gates = [gate for gate in study.gates if study.space.get(gate)]
    names = list(dict.fromkeys(name for gate in gates for name in study.space[gate]))
    rows = [[name, *(_format_distribution(study.space[gate].get(name)) for gate in gates)] for name in names]
    return SettingTable(["setting", *gates], rows)


def _format_distribution(spec: Any) -> str:
    if spec is None:
        return MISSING
    for kind, note in (("log", ", log"), ("uniform", "")):
        if kind in spec:
            low, high = spec[kind]
            return f"{low:g} to {high:g}{note}"
    if "choice" in spec:
        return "{" + ", ".join(map(format_value, spec["choice"])) + "}"
    return format_value(spec)


def _dataset(description: Mapping) -> Dataset:
    facts = [
        (name, value if _is_list_of_texts(value) else [format_value(value)])
        for name, value in flatten(description).items()
        if name != "sources" and value not in ({}, [])
    ]
    sources = description.get("sources") or []
    columns = list(dict.fromkeys(name for source in sources for name in source))
    rows = [[format_value(source.get(name, MISSING)) for name in columns] for source in sources]
    return Dataset(facts, SettingTable(columns, rows))


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
