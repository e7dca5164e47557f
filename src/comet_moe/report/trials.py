"""The complete trials of a study as columns, and the settings that were drawn."""

import json
from typing import Any

import pandas as pd

from comet_moe.analysis.selection import ranked
from comet_moe.analysis.study import Study
from comet_moe.report.numbers import brief, briefs

COLUMNS = {
    "test": "test_loss",
    "validation": "validation_loss",
    "experts": "experts_per_sample",
    "flops": "flops_per_sample",
}


def columns(study: Study) -> dict[str, dict[str, Any]]:
    """For each gate its complete trials: index, losses, costs and the settings that were drawn."""
    drawn = {parameter["name"]: parameter for parameter in parameters(study)}
    return {gate: _of_gate(ranked(study.of(gate)), study.space.get(gate, {}), drawn) for gate in study.gates}


def _of_gate(trials: pd.DataFrame, space: dict[str, Any], drawn: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {name: briefs(trials[column]) for name, column in COLUMNS.items()}
    found["index"] = [int(index) for index in trials["index"]]
    found["params"] = {
        name: [_value(params.get(name), drawn[name]) for params in trials["params"]]
        for name in space
        if name in drawn
    }
    return found


def _value(value: Any, parameter: dict[str, Any]) -> Any:
    if parameter["levels"]:
        return _label(value)
    return brief(value) if isinstance(value, float) else value


def parameters(study: Study) -> list[dict[str, Any]]:
    """The settings that were drawn: name, axis ("log" or "linear"), and the levels of a choice.

    A setting that one gate draws from a range and another from a list has an axis and no levels.
    """
    specs: dict[str, list[dict[str, Any]]] = {}
    for space in study.space.values():
        for name, spec in space.items():
            specs.setdefault(name, []).append(spec)
    return [
        {
            "name": name,
            "axis": "log" if any("log" in spec for spec in found) else "linear",
            "levels": _levels(found) if all("choice" in spec for spec in found) else None,
        }
        for name, found in specs.items()
    ]


def _levels(specs: list[dict[str, Any]]) -> list[str]:
    values = [value for spec in specs for value in spec["choice"]]
    if all(isinstance(value, int | float) for value in values):
        values = sorted(values)
    return list(dict.fromkeys(map(_label, values)))


def _label(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)
