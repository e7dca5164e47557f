"""Run folders, as far as they are here: epochs, result, configuration, environment."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, RootModel

from comet_moe.analysis.records import read_json, read_lines, read_yaml
from comet_moe.analysis.selection import ranked
from comet_moe.analysis.study import Study


class Epoch(BaseModel):
    """What the report reads of a line of ``metrics.jsonl``; older runs lack the permutations."""

    epoch: int
    train_loss: float | None = None
    validation_loss: float | None = None
    train_usage: dict[str, dict[str, Any]] = {}
    permutations: list[Any] = []
    soft_permutations: list[Any] = []


class _Usage(BaseModel):
    usage: dict[str, dict[str, Any]] = {}


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
    runs = {gate: runs_here(gate, ranked(study.of(gate))) for gate in study.gates}
    return {gate: found[0] for gate, found in runs.items() if found}
