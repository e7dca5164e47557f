"""A comparison within a time budget: fewer candidates, then fewer seeds, then fewer epochs.

Rounds as in successive halving. The first has one seed of each network, in equal shares of 40 % of the time.
There are fewer networks where a share would be too short. Every later round has the dense networks, and the
better half of the last mixtures by validation loss. Where a dense network has not converged, only the better
half of those goes on as well. Networks that have not converged are trained on, in half of the time that is
left. If all have, the round has one more seed of each, as long as that fits into what is left.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from comet_moe.experiments.studies.records import TrialRecord
from comet_moe.gates.registry import is_dense

FIRST_SHARE = 0.4
"""Share of the time for the first seed of all networks; the rest is for the better ones."""
BASELINE_SHARE = 0.2
"""Largest share of the budget for the models that are no networks."""
RESERVED = 0.1
"""Least share of the budget for what follows training: the time per prediction, and the page."""
MOST_RESERVED = 0.25
SHORTEST_RUN = 4.0
"""Seconds below which a run is not worth its start; there are fewer networks then."""

_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Round:
    """A round of ``gates``, which trains ``runs`` of them for at most ``max_seconds`` each.

    Attributes:
        adds_seed: whether it trains one more seed of each; else the seeds that are there, to their end.
    """

    gates: list[str]
    runs: list[str]
    max_seconds: float
    adds_seed: bool


@dataclass(frozen=True)
class Trained:
    """What is known of a network after a round: its mean validation loss, and the seconds of a run."""

    validation_loss: float
    seconds: float
    converged: bool = True


def training_seconds(budget: float, started: float) -> float:
    """The time from the start of the command to the end of training.

    What follows training takes about as long as the imports, which took ``started`` seconds. Both are the
    same work in every comparison, and take longer on a busy machine.
    """
    return budget - min(max(RESERVED * budget, started), MOST_RESERVED * budget)


def parse_budget(text: str) -> float | None:
    """Seconds of "90s", "10m" or "1.5h"; None for "none". Any other text raises ValueError."""
    if text == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"must be a time such as 90s, 10m or 1h, or none, got {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def first_round(waiting: Sequence[str], runs: int, seconds: float, workers: int) -> Round:
    """The ``runs`` of the ``waiting`` networks, or of those that fit: one of each, more if it resumes."""
    time = FIRST_SHARE * max(seconds, 0.0) * workers
    if runs > len(waiting):
        return Round(list(waiting), list(waiting), time / max(runs, workers), False)
    kept = [gate for gate in waiting if gate in most_useful(waiting, int(time / SHORTEST_RUN))]
    return Round(kept, kept, time / max(len(kept), workers), False)


def most_useful(gates: Sequence[str], count: int) -> list[str]:
    """``count`` of ``gates``: a dense network, mixtures, other dense ones; one of the first two at least."""
    dense = [gate for gate in gates if is_dense(gate)]
    mixtures = [gate for gate in gates if gate not in dense]
    first = ["dense"] if "dense" in dense else dense[:1]
    ordered = [*first, *mixtures, *(gate for gate in dense if gate not in first)]
    return ordered[: max(count, len(first) + len(mixtures[:1]))]


def next_round(trained: Mapping[str, Trained], seconds: float, workers: int) -> Round | None:
    """The round after one of the ``trained`` networks, or None if nothing more ends in time."""
    dense, mixtures = _by_loss(trained, True), _by_loss(trained, False)
    if any(not trained[gate].converged for gate in dense):
        dense = dense[: ceil(len(dense) / 2)]
    gates = [*dense, *mixtures[: ceil(len(mixtures) / 2)]]
    if not gates or seconds < SHORTEST_RUN:
        return None
    unfinished = [gate for gate in gates if not trained[gate].converged]
    if unfinished:
        time = seconds * workers / max(len(unfinished), workers)
        has_rest = time / 2 >= SHORTEST_RUN and len(mixtures) + len(dense) > 2
        return Round(gates, unfinished, time / 2 if has_rest else time, False)
    needed = sum(trained[gate].seconds for gate in gates) / workers
    if max(needed, *(trained[gate].seconds for gate in gates)) > seconds:
        return None
    return Round(gates, gates, seconds * workers / max(len(gates), workers), True)


def _by_loss(trained: Mapping[str, Trained], of_dense: bool) -> list[str]:
    gates = [gate for gate in trained if is_dense(gate) == of_dense]
    return sorted(gates, key=lambda gate: trained[gate].validation_loss)


def describe_reduction(trials: Sequence[TrialRecord], gates: Sequence[str], seeds: int) -> str:
    """What a budget has reduced, in one line: networks, seeds, epochs; "" for nothing."""
    complete = {
        gate: [trial for trial in trials if trial.gate == gate and trial.status == "complete"]
        for gate in gates
    }
    missing = [gate for gate in gates if not complete[gate]]
    fewer = {gate: len(found) for gate, found in complete.items() if 0 < len(found) < seeds}
    cut = [gate for gate, found in complete.items() if any(trial.converged is False for trial in found)]
    parts = [f"not trained: {', '.join(missing)}"] if missing else []
    if fewer:
        counts = ", ".join(f"{gate} {count}" for gate, count in fewer.items())
        parts.append(f"seeds of {seeds} per network: {counts}")
    if cut:
        parts.append(f"epochs before convergence: {', '.join(cut)}")
    return "; ".join(parts)
