"""Test loss over tuning budget: what the best of s trials by validation loss comes to."""

from typing import Any

import numpy as np

from comet_moe.analysis.draws import Floats, best_ranks, budgets, rank_probabilities
from comet_moe.analysis.selection import failures, ranked
from comet_moe.analysis.significance import summarise
from comet_moe.analysis.study import Study, StudyError

REPEATS = 1000
BAND = (0.05, 0.95)


def losses_by_rank(study: Study, gate: str) -> Floats:
    """(N,) test losses of the trials of ``gate`` that are done, the best validation loss first.

    Failed trials come last. Who draws nothing else has spent the budget on nothing: that counts as the worst
    complete test loss, the least that can be said of it.
    """
    trials = study.of(gate)
    complete = ranked(trials)["test_loss"].to_numpy()
    if len(complete) == 0:
        raise StudyError(
            f"{gate} of {study.title} has no complete trial: wait for one, or leave the gate out"
        )
    return np.concatenate([complete, np.full(failures(trials), complete.max())])


def drawable(study: Study) -> list[str]:
    """The gates that have a complete trial, and so a curve."""
    complete = set(study.trials.loc[study.trials["status"] == "complete", "gate"])
    return [gate for gate in study.gates if gate in complete]


def without_curve(study: Study) -> list[str]:
    """The gates that have no complete trial."""
    return [gate for gate in study.gates if gate not in drawable(study)]


def curve_rows(study: Study, repeats: int = REPEATS, seed: int = 0) -> list[dict[str, Any]]:
    """One row for each gate that has a complete trial, and each budget s.

    ``expected``: the exact mean test loss of the best of s trials by validation loss, over all draws without
    replacement. ``mean``, ``mean_se``: the same by ``repeats`` random draws, as in the paper, and the
    standard error of drawing. ``low``, ``high``: between these lie the middle 90 % of the draws.
    ``nothing``: the probability that all s failed.
    """
    if repeats < 2:
        raise StudyError(f"{repeats} repeats give no spread: draw at least 2")
    return [row for gate in drawable(study) for row in _curve(study, gate, repeats, seed)]


def _curve(study: Study, gate: str, repeats: int, seed: int) -> list[dict[str, Any]]:
    losses = losses_by_rank(study, gate)
    failed = failures(study.of(gate))
    sizes = np.array(budgets(len(losses)))
    chances = rank_probabilities(sizes, len(losses))
    drawn = losses[best_ranks(sizes, len(losses), repeats, np.random.default_rng(seed))]
    known = {"study": study.name, "recipe": study.recipe, "alpha": study.alpha, "gate": gate}
    known |= {"trials": len(losses), "trials_failed": failed}
    return [
        known
        | {"budget": int(size), "expected": float(chance @ losses)}
        | _spread(sample)
        | {"nothing": float(chance[len(losses) - failed :].sum())}
        for size, chance, sample in zip(sizes, chances, drawn.T, strict=True)
    ]


def _spread(drawn: Floats) -> dict[str, float | None]:
    found = summarise(list(drawn))
    assert found is not None
    low, high = np.quantile(drawn, BAND)
    return {"mean": found.mean, "mean_se": found.se, "low": float(low), "high": float(high)}
