"""Data for the plots of losses, costs and settings, and the run folders that it comes from.

The plots get plain data from a JSON block, with numbers rounded to a few digits.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import RootModel

from comet_moe.experiments.report.format import round_number, round_numbers
from comet_moe.experiments.studies.defaults import TOP_PERCENT
from comet_moe.experiments.studies.loss_by_trials import compute_loss_curves
from comet_moe.experiments.studies.reading import (
    Study,
    rank_trials,
    read_json,
    read_lines,
    read_yaml,
    select_trials,
)
from comet_moe.experiments.training.records import EpochRecord, ResultRecord, RoutingRecord

SHOWN_RUNS = 5
"""Number of runs per gate that are drawn as lines; the band is the range of all runs in the table."""

TRIAL_COLUMNS = {
    "test": "test_loss",
    "validation": "validation_loss",
    "experts": "experts_per_sample",
    "flops": "flops_per_sample",
}
"""Columns of a study's trials that plots draw, by their name in the data block."""


class _Mapping(RootModel[dict[str, Any]]):
    pass


class _Mappings(RootModel[list[dict[str, Any]]]):
    pass


@dataclass(frozen=True)
class Run:
    """A run folder on this machine, and its row in the study's trials."""

    gate: str
    path: Path
    trial: pd.Series

    @cached_property
    def epochs(self) -> list[EpochRecord]:
        """One record per epoch."""
        return read_lines(self.path / "metrics.jsonl", EpochRecord)

    @cached_property
    def result(self) -> ResultRecord:
        """The best weights on the held-out splits."""
        return read_json(self.path / "result.json", ResultRecord)

    @property
    def routing(self) -> dict[str, RoutingRecord]:
        """Routing of the best weights on the test split: one record per task, or per layer."""
        return self.result.routing

    def gain_of_groups(self, grouping: str) -> dict[str, float | None]:
        """The routing gain of each group by its label; empty where it was not measured."""
        gain = self.result.gain
        groups = {} if gain is None else gain.by_group.get(grouping, {})
        return {label: change.gain for label, change in groups.items()}

    @cached_property
    def config(self) -> dict[str, Any]:
        """All settings."""
        return read_yaml(self.path / "config.yaml", _Mapping).root

    @property
    def environments(self) -> list[dict[str, Any]]:
        """Versions and hardware at the start of the run and at each resume."""
        file = self.path / "environment.json"
        return read_json(file, _Mappings).root if file.is_file() else []

    @property
    def dataset(self) -> dict[str, Any]:
        """Metadata of the data set, from ``data.json``."""
        file = self.path / "data.json"
        return read_json(file, _Mapping).root if file.is_file() else {}

    @property
    def index(self) -> int:
        """Number of the trial, from 0 for each gate."""
        return int(self.trial["index"])

    @property
    def best_epoch(self) -> int:
        """The epoch whose weights were kept, from 1; the last epoch if it is unknown."""
        best = self.trial["best_epoch"]
        return len(self.epochs) if pd.isna(best) else int(best)


def available_runs(gate: str, trials: pd.DataFrame) -> list[Run]:
    """Runs of the ``trials`` of ``gate`` whose folder is on this machine, in the order given."""
    runs = [Run(gate, trial["run"], trial) for _, trial in trials.iterrows() if trial["run"] is not None]
    needed = ("metrics.jsonl", "result.json", "config.yaml")
    return [run for run in runs if all((run.path / name).is_file() for name in needed)]


def best_runs(study: Study) -> dict[str, Run]:
    """The available run of each gate with the lowest validation loss."""
    runs = {gate: available_runs(gate, rank_trials(study.trials_of(gate))) for gate in study.gates}
    return {gate: best_first[0] for gate, best_first in runs.items() if best_first}


def trial_columns(study: Study) -> dict[str, dict[str, Any]]:
    """Complete trials of each gate as columns: index, losses, costs, and sampled parameters."""
    by_name = {parameter["name"]: parameter for parameter in parameters(study)}
    columns: dict[str, dict[str, Any]] = {}
    for gate in study.gates:
        trials = rank_trials(study.trials_of(gate))
        columns[gate] = {name: round_numbers(trials[column]) for name, column in TRIAL_COLUMNS.items()} | {
            "index": [int(index) for index in trials["index"]],
            "params": {
                name: [_parameter_value(params.get(name), by_name[name]) for params in trials["params"]]
                for name in study.space.get(gate, {})
            },
        }
    return columns


def parameters(study: Study) -> list[dict[str, Any]]:
    """Parameters of the search space: name, axis ("log" or "linear") and choices.

    ``choices`` is None for a parameter that at least one gate samples from a range.
    """
    specs: dict[str, list[dict[str, Any]]] = {}
    for space in study.space.values():
        for name, spec in space.items():
            specs.setdefault(name, []).append(spec)
    return [
        {
            "name": name,
            "axis": "log" if any("log" in spec for spec in of_gates) else "linear",
            "choices": _choices(of_gates) if all("choice" in spec for spec in of_gates) else None,
        }
        for name, of_gates in specs.items()
    ]


def _choices(specs: list[dict[str, Any]]) -> list[str]:
    values = [value for spec in specs for value in spec["choice"]]
    if all(isinstance(value, int | float) for value in values):
        values = sorted(values)
    return list(dict.fromkeys(map(_choice_text, values)))


def _choice_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _parameter_value(value: Any, parameter: dict[str, Any]) -> Any:
    if parameter["choices"]:
        return _choice_text(value)
    return round_number(value) if isinstance(value, float) else value


def loss_curves(study: Study) -> dict[str, dict[str, Any]]:
    """Losses by epoch of each gate: its best runs, and the range of all runs in the table."""
    runs = {gate: available_runs(gate, select_trials(study, gate, TOP_PERCENT)) for gate in study.gates}
    return {gate: _loss_curves(best_first) for gate, best_first in runs.items() if best_first}


def _loss_curves(runs: list[Run]) -> dict[str, Any]:
    train = [[epoch.train_loss for epoch in run.epochs] for run in runs]
    validation = [[epoch.validation.loss for epoch in run.epochs] for run in runs]
    return {
        "runs": [
            {
                "index": run.index,
                "best_epoch": run.best_epoch,
                "train": round_numbers(train[rank]),
                "validation": round_numbers(validation[rank]),
            }
            for rank, run in enumerate(runs[:SHOWN_RUNS])
        ],
        "count": len(runs),
        "train": _range(train),
        "validation": _range(validation),
    }


def _range(curves: list[list[float | None]]) -> dict[str, list[float | None]]:
    """Lowest and highest loss of each epoch, over the curves that reach it."""
    losses = np.full((len(curves), max(map(len, curves))), np.nan)
    for row, curve in zip(losses, curves, strict=True):
        row[: len(curve)] = np.array(curve, dtype=float)
    # fmin and fmax ignore NaN and, unlike nanmin and nanmax, do not warn if all values are NaN
    return {"low": round_numbers(np.fmin.reduce(losses)), "high": round_numbers(np.fmax.reduce(losses))}


def tuning_curves(study: Study) -> dict[str, dict[str, Any]]:
    """Expected test loss of the best of s trials and its 90 % band, for each gate with complete trials."""
    curves: dict[str, dict[str, list[Any]]] = {}
    for row in compute_loss_curves(study):
        curve = curves.setdefault(row["gate"], {"trials": [], "mean": [], "low": [], "high": []})
        curve["trials"].append(row["budget"])
        for name, column in (("mean", "expected"), ("low", "low"), ("high", "high")):
            curve[name].append(round_number(row[column]))
    return curves
