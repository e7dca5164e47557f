"""The best of s trials drawn at random: in closed form, and by drawing.

Shapes: N trials, S budgets, R repeats. Trials are given by rank, the best validation loss first.

Test loss over tuning budget: what the best of s trials by validation loss comes to.

How much less tuning one gate needs than another for the same test loss.

Shapes: N trials, S budgets 1..S, R resamples.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comet_moe.analysis.stats import summarise
from comet_moe.analysis.study import Study, failures, ranked
from comet_moe.exceptions import StudyError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LARGEST = 250


def budgets(trials: int) -> list[int]:
    """The paper's budgets {1, 2, 5, 10, 15, ..., 250}, as far as there are ``trials``."""
    return [s for s in (1, 2, *range(5, LARGEST + 1, 5)) if s <= trials]


def rank_probabilities(sizes: Ints, trials: int) -> Floats:
    """(S, N): with which probability each rank is the best of s trials drawn without replacement.

    P(rank r | s) = C(N-r, s-1) / C(N, s), r = 1..N, by its recursion
    P(1) = s/N, P(r+1) = P(r) (N-r-s+1) / (N-r), which neither overflows nor cancels.
    """
    s = np.asarray(sizes, dtype=float)[:, None]
    rank = np.arange(1, trials)
    ratios = np.maximum(trials - rank - s + 1, 0) / (trials - rank)
    return np.cumprod(np.hstack([s / trials, ratios]), axis=1)


def best_ranks(sizes: Ints, trials: int, repeats: int, random: np.random.Generator) -> Ints:
    """(R, S): the best rank, from 0, of s trials drawn without replacement.

    A repeat puts the trials in a random order and draws the first s of it, for every s: the budgets of a
    repeat are drawn from one another, and each of them is a fair draw by itself.
    """
    order = random.permuted(np.broadcast_to(np.arange(trials), (repeats, trials)), axis=1)
    best: Ints = np.minimum.accumulate(order, axis=1)[:, np.asarray(sizes) - 1]
    return best


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


Pair = tuple[str, str]

POPULAR = ("hash", "topk", "dselect")
COVERAGE = (0.025, 0.975)
NEVER = 0
# Curves are sums of up to some hundred products: two that are equal differ by less than this share.
ROUNDING = 1e-9


def parse_pair(text: str) -> Pair:
    """``"comet+:topk"`` as the pair of its gates."""
    gate, colon, rival = text.partition(":")
    if not (gate and colon and rival) or ":" in rival:
        raise StudyError(f"{text!r} is no pair of gates: give two names with a colon, as in comet+:topk")
    return gate, rival


def default_pairs(study: Study) -> list[Pair]:
    """Each gate with local search and itself without; COMET and COMET+ and each of ``POPULAR``."""
    gates = drawable(study)
    searches = [(gate, gate[:-1]) for gate in gates if gate.endswith("+")]
    ours = [(gate, rival) for gate in ("comet", "comet+") for rival in POPULAR]
    return [pair for pair in searches + ours if set(pair) <= set(gates)]


def chosen_pairs(studies: Sequence[Study], pairs: Sequence[Pair]) -> list[tuple[Study, list[Pair]]]:
    """For each study the ``pairs`` that it has curves of, without any the default ones."""
    for pair in pairs:
        if not any(set(pair) <= set(drawable(study)) for study in studies):
            there = sorted({gate for study in studies for gate in drawable(study)})
            raise StudyError(
                f"no study has complete trials of both {pair[0]} and {pair[1]}: there are {', '.join(there)}"
            )
    return [
        (study, [p for p in pairs if set(p) <= set(drawable(study))] if pairs else default_pairs(study))
        for study in studies
    ]


def reduction_rows(
    study: Study, pairs: Sequence[Pair], repeats: int = REPEATS, seed: int = 0
) -> list[dict[str, Any]]:
    """One row for each pair (gate, rival) and each budget of the rival.

    ``loss`` is what the rival's expected curve comes to with ``budget`` trials, ``rival_trials`` and
    ``gate_trials`` the fewest trials with which either curve gets there, ``factor`` = rival_trials /
    gate_trials. ``factor_low``, ``factor_high``: 95 % of ``repeats`` resamples of both gates' trials, with
    replacement, lie between. ``never`` is the share of the resamples in which the gate does not get there
    with all its trials; they count as the smallest factors. None for a factor says: it does not get there.
    """
    if repeats < 2:
        raise StudyError(f"{repeats} repeats give no interval: draw at least 2")
    return [row for pair in pairs for row in _reduction(study, pair, repeats, seed)]


def _reduction(study: Study, pair: Pair, repeats: int, seed: int) -> list[dict[str, Any]]:
    (gate, gate_resampled), (rival, rival_resampled) = (
        _curves(losses_by_rank(study, name), repeats, random)
        for name, random in zip(pair, np.random.default_rng(seed).spawn(2), strict=True)
    )
    return [
        _row(study, pair, size, needed(gate, rival, size), needed(gate_resampled, rival_resampled, size))
        | {"loss": float(rival[0, size - 1])}
        for size in budgets(rival.shape[1])
    ]


def _curves(losses: Floats, repeats: int, random: np.random.Generator) -> tuple[Floats, Floats]:
    ranks = random.integers(len(losses), size=(repeats, len(losses)))
    return expected_curve(losses[None]), expected_curve(losses[np.sort(ranks, axis=1)])


def expected_curve(losses: Floats) -> Floats:
    """(R, S) expected test loss of the best of s = 1..S trials, from (R, N) losses by rank."""
    trials = losses.shape[1]
    return losses @ rank_probabilities(np.arange(1, budgets(trials)[-1] + 1), trials).T


def needed(gate: Floats, rival: Floats, size: int) -> Ints:
    """(R, 2) fewest trials of gate and rival that reach the rival's loss with ``size`` trials, or NEVER.

    The rival may need fewer than ``size``: curves can rise where validation and test disagree.
    """
    loss = rival[:, size - 1 : size]
    limit = loss + ROUNDING * np.abs(loss)
    return np.stack([_fewest(curve, limit) for curve in (gate, rival)], axis=1)


def _fewest(curve: Floats, limit: Floats) -> Ints:
    reached = curve <= limit
    fewest: Ints = np.where(reached.any(axis=1), reached.argmax(axis=1) + 1, NEVER)
    return fewest


def _row(study: Study, pair: Pair, size: int, found: Ints, resampled: Ints) -> dict[str, Any]:
    gate_trials, rival_trials = (int(number) for number in found[0])
    # A gate that never gets there has a factor below every other: 0.
    factors = np.where(resampled[:, 0] == NEVER, 0, resampled[:, 1] / np.maximum(resampled[:, 0], 1))
    low, high = np.quantile(factors, COVERAGE, method="inverted_cdf")  # no number between 0 and a factor
    return {
        "study": study.name,
        "recipe": study.recipe,
        "alpha": study.alpha,
        "gate": pair[0],
        "rival": pair[1],
        "budget": size,
        "rival_trials": rival_trials,
        "gate_trials": gate_trials or None,
        "factor": rival_trials / gate_trials if gate_trials else None,
        "factor_low": float(low) or None,
        "factor_high": float(high) or None,
        "never": float((factors == 0).mean()),
    }
