"""Test loss by number of trials, and how many fewer trials one gate needs than another for the same loss.

A budget is a number of trials: s of a gate's N trials are drawn without replacement. The one with the lowest
validation loss is kept, and its test loss counts.

Shapes: N trials, S budgets, R repeats. Losses are given by rank, that of the lowest validation loss first.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comet_moe.exceptions import StudyError
from comet_moe.experiments.studies.defaults import DEFAULT_REPEATS
from comet_moe.experiments.studies.networks import without_search
from comet_moe.experiments.studies.reading import Study, count_status, rank_trials
from comet_moe.experiments.studies.significance import summarise

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Pair = tuple[str, str]
"""A gate and the baseline that it is compared with."""

MAX_BUDGET = 250
BAND_QUANTILES = (0.05, 0.95)
INTERVAL_QUANTILES = (0.025, 0.975)
BASELINES = ("hash", "topk", "dselect")
NOT_REACHED = 0
# Curves are sums of up to some hundred products: two that are equal differ by less than this share.
ROUNDING = 1e-9


def budget_grid(num_trials: int) -> list[int]:
    """The paper's budgets {1, 2, 5, 10, 15, ..., 250}, up to ``num_trials``."""
    return [s for s in (1, 2, *range(5, MAX_BUDGET + 1, 5)) if s <= num_trials]


def best_rank_probabilities(budgets: Ints, num_trials: int) -> Floats:
    """(S, N) probability that the trial of each rank is the best of s trials drawn without replacement.

    P(rank r | s) = C(N-r, s-1) / C(N, s), r = 1..N. The recursion
    P(1) = s/N, P(r+1) = P(r) (N-r-s+1) / (N-r) neither overflows nor cancels.
    """
    s = np.asarray(budgets, dtype=float)[:, None]
    rank = np.arange(1, num_trials)
    ratios = np.maximum(num_trials - rank - s + 1, 0) / (num_trials - rank)
    return np.cumprod(np.hstack([s / num_trials, ratios]), axis=1)


def draw_best_ranks(budgets: Ints, num_trials: int, repeats: int, random: np.random.Generator) -> Ints:
    """(R, S) best rank, from 0, of s trials drawn without replacement.

    A repeat shuffles the trials and takes the first s of them, for every s. The budgets of one repeat are
    nested, and each of them is a fair draw.
    """
    order = random.permuted(np.broadcast_to(np.arange(num_trials), (repeats, num_trials)), axis=1)
    best: Ints = np.minimum.accumulate(order, axis=1)[:, np.asarray(budgets) - 1]
    return best


def expected_losses(losses: Floats) -> Floats:
    """(R, S) expected test loss of the best of s = 1..S trials, from (R, N) losses by rank."""
    num_trials = losses.shape[1]
    budgets = np.arange(1, budget_grid(num_trials)[-1] + 1)
    return losses @ best_rank_probabilities(budgets, num_trials).T


def ranked_test_losses(study: Study, gate: str) -> Floats:
    """(N,) test losses of the finished trials of ``gate``, that of the lowest validation loss first.

    Failed trials are last, with the worst test loss of a complete one. A draw of only failed trials has spent
    its budget without a result, and is at least that bad. Pruned trials are left out.
    """
    trials = study.trials_of(gate)
    complete = rank_trials(trials)["test_loss"].to_numpy()
    if len(complete) == 0:
        raise StudyError(
            f"{gate} of {study.title} has no complete trial: wait for one, or leave the gate out"
        )
    return np.concatenate([complete, np.full(count_status(trials, "failed"), complete.max())])


def compute_loss_curves(study: Study, repeats: int = DEFAULT_REPEATS, seed: int = 0) -> list[dict[str, Any]]:
    """Test loss by number of trials: one row per gate that has a complete trial, and per budget s.

    ``expected``: the exact mean over all draws of s trials. ``mean``, ``mean_se``: the mean of ``repeats``
    random draws, as in the paper, and its standard error. ``low``, ``high``: the 5 % and 95 % quantiles of
    these draws. ``all_failed_probability``: that all s trials of a draw failed. ``information``,
    ``effective_experts``: expected values of the trial that is kept, over the draws that did not fail. They
    are means over the gates of its model, and None where trials have not recorded them.
    """
    if repeats < 2:
        raise StudyError(f"repeats must be at least 2 to have a spread, got {repeats}")
    return [row for gate in study.gates_with_results for row in _loss_curve(study, gate, repeats, seed)]


def _loss_curve(study: Study, gate: str, repeats: int, seed: int) -> list[dict[str, Any]]:
    losses = ranked_test_losses(study, gate)
    trials = study.trials_of(gate)
    num_failed, complete = count_status(trials, "failed"), rank_trials(trials)
    routing = {name: complete[name].to_numpy() for name in ("information", "effective_experts")}
    budgets = np.array(budget_grid(len(losses)))
    probabilities = best_rank_probabilities(budgets, len(losses))
    draws = losses[draw_best_ranks(budgets, len(losses), repeats, np.random.default_rng(seed))]
    shared = _names(study, gate) | {"trials": len(losses), "trials_failed": num_failed}
    shared |= {"trials_pruned": count_status(trials, "pruned")}
    return [
        shared
        | {"budget": int(budget), "expected": float(probability @ losses)}
        | _spread(sample)
        | {"all_failed_probability": float(probability[len(losses) - num_failed :].sum())}
        | {name: _expected_if_complete(probability, values) for name, values in routing.items()}
        for budget, probability, sample in zip(budgets, probabilities, draws.T, strict=True)
    ]


def _names(study: Study, gate: str) -> dict[str, Any]:
    return {"study": study.name, "recipe": study.recipe, "alpha": study.alpha, "gate": gate}


def _expected_if_complete(probability: Floats, values: Floats) -> float | None:
    """Expected value of the trial that is kept, given that it is a complete one; None if one has no value."""
    kept = probability[: len(values)]
    expected = float(kept @ values / kept.sum())
    return expected if isfinite(expected) else None


def _spread(draws: Floats) -> dict[str, float | None]:
    summary = summarise(list(draws))
    assert summary is not None
    low, high = np.quantile(draws, BAND_QUANTILES)
    return {"mean": summary.mean, "mean_se": summary.se, "low": float(low), "high": float(high)}


def parse_pair(text: str) -> Pair:
    """``"comet+:topk"`` as a gate and its baseline."""
    gate, colon, baseline = text.partition(":")
    if not (gate and colon and baseline) or ":" in baseline:
        raise StudyError(f"a pair has the form GATE:BASELINE, as in comet+:topk, got {text!r}")
    return gate, baseline


def default_pairs(study: Study) -> list[Pair]:
    """Each gate with local search and the same without; COMET and COMET+ and each of ``BASELINES``."""
    gates = study.gates_with_results
    searches = [(gate, plain) for gate in gates if (plain := without_search(gate))]
    comet = [(gate, baseline) for gate in ("comet", "comet+") for baseline in BASELINES]
    return [pair for pair in searches + comet if set(pair) <= set(gates)]


def select_pairs(studies: Sequence[Study], pairs: Sequence[Pair]) -> list[tuple[Study, list[Pair]]]:
    """For each study those of ``pairs`` that it has complete trials of; the default pairs if none."""
    if not pairs:
        return [(study, default_pairs(study)) for study in studies]
    known = [(study, set(study.gates_with_results)) for study in studies]
    for gate, baseline in pairs:
        if not any({gate, baseline} <= gates for _, gates in known):
            names = ", ".join(sorted(set().union(*(gates for _, gates in known))))
            raise StudyError(
                f"no study has complete trials of both {gate} and {baseline}: choose from {names}"
            )
    return [(study, [pair for pair in pairs if set(pair) <= gates]) for study, gates in known]


def compute_speedups(
    study: Study, pairs: Sequence[Pair], repeats: int = DEFAULT_REPEATS, seed: int = 0
) -> list[dict[str, Any]]:
    """How many times fewer trials a gate needs than a baseline: one row per pair and per baseline budget.

    ``loss`` is the expected loss of the baseline with ``budget`` trials. ``baseline_trials`` and
    ``gate_trials`` are the fewest trials whose expected loss is as low. ``speedup`` is their ratio, None
    where the gate does not reach the loss with all its trials. ``speedup_low``,
    ``speedup_high``: the 95 % interval over ``repeats`` resamples of both gates' trials, with replacement.
    ``not_reached`` is the share of the resamples in which the gate does not reach the loss; they count as the
    smallest speedups.
    """
    if repeats < 2:
        raise StudyError(f"repeats must be at least 2 to have an interval, got {repeats}")
    return [row for pair in pairs for row in _speedups_of_pair(study, pair, repeats, seed)]


def _speedups_of_pair(study: Study, pair: Pair, repeats: int, seed: int) -> list[dict[str, Any]]:
    (gate, gate_resampled), (baseline, baseline_resampled) = (
        _resample_curves(ranked_test_losses(study, name), repeats, random)
        for name, random in zip(pair, np.random.default_rng(seed).spawn(2), strict=True)
    )
    rows = []
    for budget in budget_grid(baseline.shape[1]):
        gate_trials, baseline_trials = map(int, count_needed_trials(gate, baseline, budget)[0])
        resampled = count_needed_trials(gate_resampled, baseline_resampled, budget)
        # A gate that does not reach the loss has a speedup below every other: 0.
        ratios = resampled[:, 1] / np.maximum(resampled[:, 0], 1)
        speedups = np.where(resampled[:, 0] == NOT_REACHED, 0, ratios)
        # Without interpolation: no number between 0 and a speedup.
        low, high = np.quantile(speedups, INTERVAL_QUANTILES, method="inverted_cdf")
        rows.append(
            _names(study, pair[0])
            | {
                "baseline": pair[1],
                "budget": budget,
                "baseline_trials": baseline_trials,
                "gate_trials": gate_trials or None,
                "speedup": baseline_trials / gate_trials if gate_trials else None,
                "speedup_low": float(low) or None,
                "speedup_high": float(high) or None,
                "not_reached": float((speedups == 0).mean()),
                "loss": float(baseline[0, budget - 1]),
            }
        )
    return rows


def _resample_curves(losses: Floats, repeats: int, random: np.random.Generator) -> tuple[Floats, Floats]:
    """(1, S) expected losses of the trials, and (R, S) of ``repeats`` resamples with replacement."""
    ranks = random.integers(len(losses), size=(repeats, len(losses)))
    return expected_losses(losses[None]), expected_losses(losses[np.sort(ranks, axis=1)])


def count_needed_trials(gate: Floats, baseline: Floats, budget: int) -> Ints:
    """(R, 2) fewest trials of gate and baseline that reach the baseline's loss at ``budget``, or NOT_REACHED.

    ``gate`` and ``baseline`` are (R, S) expected losses. The baseline may need fewer trials than ``budget``:
    a curve can rise where validation and test disagree.
    """
    loss = baseline[:, budget - 1 : budget]
    limit = loss + ROUNDING * np.abs(loss)
    reached = [curve <= limit for curve in (gate, baseline)]
    fewest = [np.where(is_low.any(axis=1), is_low.argmax(axis=1) + 1, NOT_REACHED) for is_low in reached]
    return np.stack(fewest, axis=1)
