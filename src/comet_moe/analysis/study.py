"""``Study``: the trials of some gates on one problem, as a plain table.

Which trials of a gate count: ranked by validation loss, the best share of them or all.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from comet_moe.exceptions import StudyError

COLUMNS = (
    "gate",
    "index",
    "status",
    "reason",
    "attempts",
    "run",
    "validation_loss",
    "test_loss",
    "experts_per_sample",
    "flops_per_sample",
    "parameters",
    "epochs",
    "best_epoch",
    "seconds",
    "params",
    "tasks",
)
FIGURES = COLUMNS[6:14]
PAPER_ORDER = (
    "softmax",
    "softmax+",
    "hash",
    "hash+",
    "topk",
    "topk+",
    "dselect",
    "dselect+",
    "comet",
    "comet+",
)


@dataclass(frozen=True, eq=False)
class Study:
    """The trials of some gates on one problem.

    Args:
        path: the folder of the study; for plain runs the folder that holds them.
        name: of the study; for plain runs that of the recipe.
        kind: "tuning" (random settings), "ablation" (fixed settings, many seeds) or "runs" (plain run
            folders that were collected).
        recipe: what was trained.
        gates: in the order of the study; for plain runs in the paper's order.
        asked: trials a gate that were asked for; for plain runs the most that a gate has.
        experts: how many the mixture has; None where plain runs differ in it.
        alpha: weight of the first task in rating models, else None.
        settings: what was laid over the recipe, as "a.b=c".
        space: for each gate, what was drawn from where.
        trials: one row a trial, columns ``COLUMNS``. Figures (``FIGURES``) are floats, NaN where there is
            none; losses are x100. ``status`` is "complete", "failed", "running" or "waiting", and a complete
            trial has finite losses. ``run`` is an absolute path, None if the folder is not here. ``params``
            and ``tasks`` are dictionaries.
    """

    path: Path
    name: str
    kind: Literal["tuning", "ablation", "runs"]
    recipe: str
    gates: list[str]
    asked: int
    experts: int | None
    alpha: float | None
    settings: list[str]
    space: dict[str, dict[str, Any]]
    trials: pd.DataFrame

    @property
    def title(self) -> str:
        """Name and task weight, as a heading."""
        return self.name if self.alpha is None else f"{self.name} (alpha={self.alpha:g})"

    def of(self, gate: str) -> pd.DataFrame:
        """The trials of ``gate``."""
        return self.trials[self.trials["gate"] == gate]

    def asked_of(self, gate: str) -> int:
        """Trials of ``gate`` that were asked for."""
        return len(self.of(gate)) if self.kind == "runs" else self.asked

    @property
    def undone(self) -> int:
        """Trials that were asked for and are neither complete nor failed."""
        done = int(self.trials["status"].isin(["complete", "failed"]).sum())
        return sum(self.asked_of(gate) for gate in self.gates) - done

    def unfinished(self) -> str | None:
        """The sentence that says how many trials are not done, if any."""
        if not self.undone:
            return None
        asked = sum(self.asked_of(gate) for gate in self.gates)
        return (
            f"{self.title}: {self.undone} of {asked} trials are not done; these are the figures of the others"
        )


def as_table(trials: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Trials as a table with the columns and types that ``Study`` promises."""
    table = pd.DataFrame([{name: trial[name] for name in COLUMNS} for trial in trials], columns=list(COLUMNS))
    objects = dict.fromkeys(("gate", "status", "reason", "run", "params", "tasks"), object)
    return table.astype(objects | dict.fromkeys(FIGURES, float) | dict.fromkeys(("index", "attempts"), int))


def ranked(trials: pd.DataFrame) -> pd.DataFrame:
    """The complete trials by validation loss, the best first; equal ones by index."""
    return trials[trials["status"] == "complete"].sort_values(["validation_loss", "index"])


def failures(trials: pd.DataFrame) -> int:
    """How many trials failed; they would rank after every complete one."""
    return int((trials["status"] == "failed").sum())


def used(study: Study, gate: str, top: float) -> pd.DataFrame:
    """The trials of ``gate`` that its row in the table is made of.

    In a tuning study the best ceil(``top`` % of the trials that were asked for), as far as they are complete;
    in an ablation and among plain runs, where nothing was selected, all complete ones.
    """
    if not 0 < top <= 100:
        raise StudyError(f"the share of best trials is {top:g} %: give more than 0 and at most 100")
    best_first = ranked(study.of(gate))
    return best_first.head(_share(study.asked_of(gate), top)) if study.kind == "tuning" else best_first


def _share(asked: int, top: float) -> int:
    return ceil(round(asked * top / 100, 9))  # rounded: 30 % of 10 is 3 and a rounding error, not 4
