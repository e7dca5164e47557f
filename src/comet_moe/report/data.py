"""Run folders, as far as they are here: epochs, result, configuration, environment.

The complete trials of a study as columns, and the settings that were drawn.

Losses over epochs, and what the best of s trials comes to.

What the best run of a gate shows of its routing: usage, convergence, permutation and trees, over time.

The longer and the wider a run, the fewer moments of it are kept, so that the page stays small.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from pydantic import AliasChoices, AliasPath, BaseModel, Field, RootModel

from comet_moe.analysis.budget import compute_loss_curves
from comet_moe.analysis.reading import read_json, read_lines, read_yaml
from comet_moe.analysis.study import Study, rank_trials, select_trials
from comet_moe.analysis.table import TOP_PERCENT
from comet_moe.report.format import brief, briefs


class Epoch(BaseModel):
    """What the report reads of a line of ``metrics.jsonl``; older runs lack the permutations."""

    epoch: int
    train_loss: float | None = None
    validation_loss: float | None = Field(default=None, validation_alias=AliasPath("validation", "loss"))
    train_routing: dict[str, dict[str, Any]] = {}
    permutations: list[Any] = []
    soft_permutations: list[Any] = []


class _Usage(BaseModel):
    usage: dict[str, dict[str, Any]] = Field(default={}, validation_alias=AliasChoices("routing", "usage"))


class _Mapping(RootModel[dict[str, Any]]):
    pass


class _Facts(RootModel[list[dict[str, Any]]]):
    pass


@dataclass(frozen=True)
class Run:
    """A run whose folder is here, and its row in the study's table."""

    gate: str
    path: Path
    trial: pd.Series

    @cached_property
    def epochs(self) -> list[Epoch]:
        """One record an epoch."""
        return read_lines(self.path / "metrics.jsonl", Epoch)

    @cached_property
    def usage(self) -> dict[str, dict[str, Any]]:
        """For each task how the best weights use the experts, on the test split."""
        return read_json(self.path / "result.json", _Usage).usage

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every setting."""
        return read_yaml(self.path / "config.yaml", _Mapping).root

    @property
    def environments(self) -> list[dict[str, Any]]:
        """With what the run was started and gone on with."""
        file = self.path / "environment.json"
        return read_json(file, _Facts).root if file.is_file() else []

    @property
    def data(self) -> dict[str, Any]:
        """The description of its data."""
        file = self.path / "data.json"
        return read_json(file, _Mapping).root if file.is_file() else {}

    @property
    def index(self) -> int:
        """Which trial of its gate."""
        return int(self.trial["index"])

    @property
    def best_epoch(self) -> int:
        """The epoch whose weights were kept; the last if that is not known."""
        best = self.trial["best_epoch"]
        return len(self.epochs) if pd.isna(best) else int(best)


def runs_here(gate: str, trials: pd.DataFrame) -> list[Run]:
    """Those of the complete ``trials`` of ``gate`` whose folder is here, in the order given."""
    found = [Run(gate, trial["run"], trial) for _, trial in trials.iterrows() if trial["run"] is not None]
    return [
        run
        for run in found
        if all((run.path / name).is_file() for name in ("metrics.jsonl", "result.json", "config.yaml"))
    ]


def best_runs(study: Study) -> dict[str, Run]:
    """For each gate the run here that has the lowest validation loss."""
    runs = {gate: runs_here(gate, rank_trials(study.trials_of(gate))) for gate in study.gates}
    return {gate: found[0] for gate, found in runs.items() if found}


COLUMNS = {
    "test": "test_loss",
    "validation": "validation_loss",
    "experts": "experts_per_sample",
    "flops": "flops_per_sample",
}


def columns(study: Study) -> dict[str, dict[str, Any]]:
    """For each gate its complete trials: index, losses, costs and the settings that were drawn."""
    drawn = {parameter["name"]: parameter for parameter in parameters(study)}
    return {
        gate: _of_gate(rank_trials(study.trials_of(gate)), study.space.get(gate, {}), drawn)
        for gate in study.gates
    }


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


FEW = 5
"""Runs of a gate that are drawn one by one; the band is over all that the table counts."""


def loss_curves(study: Study) -> dict[str, dict[str, Any]]:
    """For each gate its best few runs, epoch by epoch, and the range of all that the table counts."""
    found = {gate: runs_here(gate, select_trials(study, gate, TOP_PERCENT)) for gate in study.gates}
    return {gate: _curves(runs) for gate, runs in found.items() if runs}


def _curves(runs: list[Run]) -> dict[str, Any]:
    train = [[epoch.train_loss for epoch in run.epochs] for run in runs]
    validation = [[epoch.validation_loss for epoch in run.epochs] for run in runs]
    return {
        "runs": [
            {
                "index": run.index,
                "best_epoch": run.best_epoch,
                "train": briefs(train[place]),
                "validation": briefs(validation[place]),
            }
            for place, run in enumerate(runs[:FEW])
        ],
        "count": len(runs),
        "train": _range(train),
        "validation": _range(validation),
    }


def _range(curves: list[list[float | None]]) -> dict[str, list[float | None]]:
    """Lowest and highest value at each epoch, among the curves that get that far."""
    length = max(map(len, curves))
    padded = np.full((len(curves), length), np.nan)
    for row, curve in zip(padded, curves, strict=True):
        row[: len(curve)] = np.array(curve, dtype=float)
    return {"low": briefs(np.nanmin(padded, axis=0)), "high": briefs(np.nanmax(padded, axis=0))}


def bootstrap_curves(study: Study) -> dict[str, dict[str, Any]]:
    """For each gate with complete trials: budgets, expected test loss, and the middle 90 % of the draws."""
    found: dict[str, dict[str, list[Any]]] = {}
    for row in compute_loss_curves(study):
        curve = found.setdefault(row["gate"], {"trials": [], "mean": [], "low": [], "high": []})
        curve["trials"].append(row["budget"])
        curve["mean"] += briefs([row["expected"]])
        curve["low"] += briefs([row["low"]])
        curve["high"] += briefs([row["high"]])
    return found


MOMENTS = 40
"""Most positions of a slider."""
NUMBERS = 60_000
"""Most numbers that one gate's slider runs through."""
FAINT = (0.0005, 0.005)
"""Entries of a soft permutation below this are not kept: up to 100 experts, and above."""
MEASURES = {"one_hot": "one_hot_trees", "entropy": "tree_entropy", "experts": "experts_per_sample"}

Item = TypeVar("Item")


def routing_of(run: Run) -> dict[str, Any]:
    """Everything about one run; a part that it does not have is left out."""
    parts = {
        "usage": _usage(run),
        "convergence": _convergence(run),
        "permutation": _permutation(run),
        "trees": _trees(run),
    }
    return {"index": run.index} | {name: part for name, part in parts.items() if part}


def _usage(run: Run) -> dict[str, Any]:
    return {
        task: {
            "samples": briefs(usage["share_of_samples"], 4),
            "weight": briefs(usage["share_of_weight"], 4),
        }
        for task, usage in run.usage.items()
        if "share_of_samples" in usage
    }


def _convergence(run: Run) -> dict[str, Any]:
    tasks = run.epochs[0].train_routing if run.epochs else {}
    return {
        task: {
            measure: briefs(epoch.train_routing[task][name] for epoch in run.epochs)
            for measure, name in MEASURES.items()
        }
        for task, usage in tasks.items()
        if usage.get("one_hot_trees") is not None
    }


def _permutation(run: Run) -> dict[str, Any] | None:
    moments: list[dict[str, Any]] = []
    for epoch in run.epochs:
        orders, soft = _each(epoch.permutations, 1), _each(epoch.soft_permutations, 2)
        searches = [
            {"order": order} | ({"matrix": _sparse(soft[place])} if soft else {})
            for place, order in enumerate(orders)
        ]
        if searches and not (moments and moments[-1]["searches"] == searches):
            moments.append({"epoch": epoch.epoch, "soft": bool(soft), "searches": searches})
    if not moments:
        return None
    heaviest = max(
        sum(len(search["order"]) + len(search.get("matrix", ())) for search in moment["searches"])
        for moment in moments
    )
    return {
        "size": len(moments[0]["searches"][0]["order"]),
        "searches": _search_names(run.epochs[0]),
        "frames": _evenly(moments, heaviest),
    }


def _each(searches: Sequence[Any], depth: int) -> list[Any]:
    """What is nested ``depth`` deep, one a search, or one for each tree of a search that has one a tree."""
    return [part for found in searches for part in (found if _is_by_tree(found, depth) else [found])]


def _is_by_tree(search: Any, depth: int = 1) -> bool:
    for _ in range(depth):
        search = search[0]
    return isinstance(search, list)


def _search_names(epoch: Epoch) -> list[str]:
    """What each permutation is of: of all tasks, of one, or of a tree of one."""
    tasks = list(epoch.train_routing)
    owners = tasks if len(epoch.permutations) == len(tasks) else ["all tasks"]
    return [
        f"of {owner}, tree {tree + 1}" if _is_by_tree(search) else f"of {owner}"
        for owner, search in zip(owners, epoch.permutations, strict=True)
        for tree in range(len(search) if _is_by_tree(search) else 1)
    ]


def _sparse(matrix: list[list[float]]) -> list[int]:
    """Place and thousandths of each entry that shows, in turn."""
    faint = FAINT[len(matrix) > 100]
    return [
        number
        for row, values in enumerate(matrix)
        for column, value in enumerate(values)
        if value >= faint
        for number in (row * len(matrix) + column, round(1000 * value))
    ]


def _trees(run: Run) -> dict[str, Any] | None:
    epochs = [epoch for epoch in run.epochs if epoch.epoch <= run.best_epoch and _has_leaves(epoch)]
    if not epochs:
        return None
    pool: dict[tuple[int, ...], int] = {}
    moments = [
        {"epoch": epoch.epoch, "tasks": dict(_leaves(epoch, pool))}
        for epoch in _evenly(epochs, sum(_leaf_count(usage) for usage in epochs[0].train_routing.values()))
    ]
    return {
        "codes": run.gate.startswith("dselect"),
        "frames": moments,
        "orders": [list(order) for order in pool],
    }


def _has_leaves(epoch: Epoch) -> bool:
    return any(usage.get("leaf_share") for usage in epoch.train_routing.values())


def _leaf_count(usage: dict[str, Any]) -> int:
    return sum(map(len, usage.get("leaf_share") or ()))


def _leaves(epoch: Epoch, pool: dict[tuple[int, ...], int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each task's trees: shares in parts of ten thousand, and which order in the ``pool`` permutes them."""
    for place, (task, usage) in enumerate(epoch.train_routing.items()):
        shares = usage["leaf_share"]
        part: dict[str, Any] = {"shares": [[round(1e4 * share) for share in tree] for tree in shares]}
        if epoch.permutations:
            search = epoch.permutations[place if len(epoch.permutations) > 1 else 0]
            orders = search if _is_by_tree(search) else [search] * len(shares)
            part["order"] = [pool.setdefault(tuple(order), len(pool)) for order in orders]
        yield task, part


def _evenly(moments: Sequence[Item], weight: int) -> list[Item]:
    """As many moments as there is room for at ``weight`` numbers each: the first, the last and between."""
    most = max(2, min(MOMENTS, NUMBERS // max(weight, 1)))
    if len(moments) <= most:
        return list(moments)
    return [moments[round(place * (len(moments) - 1) / (most - 1))] for place in range(most)]
