"""Losses over epochs, and what the best of s trials comes to."""

from typing import Any

import numpy as np

from comet_moe.analysis.curves import curve_rows
from comet_moe.analysis.selection import used
from comet_moe.analysis.study import Study
from comet_moe.analysis.table import TOP
from comet_moe.report.numbers import briefs
from comet_moe.report.runs import Run, runs_here

FEW = 5
"""Runs of a gate that are drawn one by one; the band is over all that the table counts."""


def loss_curves(study: Study) -> dict[str, dict[str, Any]]:
    """For each gate its best few runs, epoch by epoch, and the range of all that the table counts."""
    found = {gate: runs_here(gate, used(study, gate, TOP)) for gate in study.gates}
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
    for row in curve_rows(study):
        curve = found.setdefault(row["gate"], {"trials": [], "mean": [], "low": [], "high": []})
        curve["trials"].append(row["budget"])
        curve["mean"] += briefs([row["expected"]])
        curve["low"] += briefs([row["low"]])
        curve["high"] += briefs([row["high"]])
    return found
