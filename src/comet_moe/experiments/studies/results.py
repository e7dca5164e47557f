"""A study as a table of trials, and which of its trials count.

``Study`` is what ``reading`` makes of a folder. Tables, curves and the report are computed from it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from comet_moe.exceptions import StudyError
from comet_moe.experiments.studies.records import FINISHED, ROUTING_COLUMNS

METRIC_COLUMNS = (
    "validation_loss",
    "test_loss",
    "experts_per_sample",
    "flops_per_sample",
    "parameters",
    "epochs",
    "best_epoch",
    "seconds",
    *ROUTING_COLUMNS,
)
"""Columns of floats, NaN where a trial has no value."""

COLUMNS = (
    "gate",
    "index",
    "status",
    "reason",
    "attempts",
    "run",
    *METRIC_COLUMNS,
    "params",
    "tasks",
    "routing",
)


@dataclass(frozen=True, eq=False)
class Study:
    """The trials of some gates on one problem.

    Args:
        path: the folder of the study; for plain runs the folder that holds them.
        name: name of the study; for plain runs that of the recipe.
        kind: "tuning" (random settings), "ablation" (fixed settings, many seeds) or "runs" (plain run
            folders that were collected).
        recipe: name of the recipe.
        gates: names of the gates in the order of the study; for plain runs as in the paper's tables.
        trials_per_gate: the planned number; for plain runs the most that a gate has.
        experts: number of experts of the mixture; None where plain runs differ in it.
        alpha: weight of the first task in rating models, else None.
        settings: overrides of the recipe, as "a.b=c".
        space: the search space of each gate, by setting.
        trials: one row per trial with the columns ``COLUMNS``. Those of ``METRIC_COLUMNS`` are floats, NaN
            where there is no value; losses are times 100. ``status`` is "complete", "failed", "pruned",
            "running" or "waiting", and a complete trial has finite losses. ``run`` is the absolute path of
            the run's folder, None if it is not on this machine. ``params``, ``tasks`` and ``routing`` (a
            `GateRecord` per gate of the model) are dictionaries.
    """

    path: Path
    name: str
    kind: Literal["tuning", "ablation", "runs"]
    recipe: str
    gates: list[str]
    trials_per_gate: int
    experts: int | None
    alpha: float | None
    settings: list[str]
    space: dict[str, dict[str, Any]]
    trials: pd.DataFrame

    @property
    def title(self) -> str:
        """Name and weight of the first task, as a heading."""
        return self.name if self.alpha is None else f"{self.name} (alpha={self.alpha:g})"

    @property
    def gates_with_results(self) -> list[str]:
        """The gates that have a complete trial."""
        complete = set(self.trials.loc[self.trials["status"] == "complete", "gate"])
        return [gate for gate in self.gates if gate in complete]

    def trials_of(self, gate: str) -> pd.DataFrame:
        """The trials of ``gate``."""
        return self.trials[self.trials["gate"] == gate]

    def planned_trials(self, gate: str) -> int:
        """How many trials of ``gate`` the study has when it is finished."""
        return len(self.trials_of(gate)) if self.kind == "runs" else self.trials_per_gate

    @property
    def num_unfinished(self) -> int:
        """Planned trials that are neither complete nor failed nor pruned."""
        finished = int(self.trials["status"].isin(FINISHED).sum())
        return self._num_planned() - finished

    def left_out(self) -> list[str]:
        """A sentence about the unfinished trials and one about the pruned ones, as far as there are any."""
        pruned, planned = count_pruned(self.trials), self._num_planned()
        messages = []
        if self.num_unfinished:
            messages.append(
                f"{self.title}: {self.num_unfinished} of {planned} trials are unfinished and not included"
            )
        if pruned:
            messages.append(
                f"{self.title}: {pruned} of {planned} trials were pruned and are not included; as these are "
                "poor ones, curves by number of trials are lower than without --prune"
            )
        return messages

    def _num_planned(self) -> int:
        return sum(self.planned_trials(gate) for gate in self.gates)


def to_frame(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Trials as a data frame with the columns and types that ``Study.trials`` has."""
    values = [[row[name] for name in COLUMNS] for row in rows]
    frame = pd.DataFrame(values, columns=list(COLUMNS), dtype=object)  # else a None among texts becomes NaN
    return frame.astype(dict.fromkeys(METRIC_COLUMNS, float) | dict.fromkeys(("index", "attempts"), int))


def rank_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """The complete trials sorted by validation loss, the lowest first; ties are sorted by index."""
    return trials[trials["status"] == "complete"].sort_values(["validation_loss", "index"])


def count_failed(trials: pd.DataFrame) -> int:
    """The number of failed trials."""
    return int((trials["status"] == "failed").sum())


def count_pruned(trials: pd.DataFrame) -> int:
    """The number of pruned trials, which have no test loss and count nowhere."""
    return int((trials["status"] == "pruned").sum())


def select_trials(study: Study, gate: str, top_percent: float) -> pd.DataFrame:
    """The trials of ``gate`` that its row in the table is computed from, the lowest validation loss first.

    In a tuning study the best ceil(``top_percent`` % of the planned trials), as far as they are complete. In
    an ablation and among plain runs, where nothing was selected, all complete ones.
    """
    if not 0 < top_percent <= 100:
        raise StudyError(f"the top percentage must be above 0 and at most 100, got {top_percent:g}")
    ranked = rank_trials(study.trials_of(gate))
    if study.kind != "tuning":
        return ranked
    # Rounded first: 30 % of 10 is 3 and a rounding error, which ceil would make 4.
    return ranked.head(ceil(round(study.planned_trials(gate) * top_percent / 100, 9)))
