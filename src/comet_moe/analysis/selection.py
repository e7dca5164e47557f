"""Which trials of a gate count: ranked by validation loss, the best share of them or all."""

from math import ceil

import pandas as pd

from comet_moe.analysis.study import Study, StudyError


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
