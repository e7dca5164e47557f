"""How much less tuning one gate needs than another for the same test loss.

Shapes: N trials, S budgets 1..S, R resamples.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from comet_moe.analysis.curves import REPEATS, drawable, losses_by_rank
from comet_moe.analysis.draws import Floats, Ints, budgets, rank_probabilities
from comet_moe.analysis.study import Study, StudyError

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
