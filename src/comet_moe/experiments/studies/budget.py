"""A comparison within a time budget: fewer candidates, then fewer seeds, then fewer epochs.

Rounds of one seed each, as in successive halving. The first has all networks, and each of its runs may take
an equal share of most of the time. Every later one has the dense networks and the better half of the last
mixtures, by validation loss. It begins only if one more seed of them fits into what is left.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from comet_moe.gates.registry import is_dense

FIRST_SHARE = 0.6
"""Share of the time for the first seed of all networks."""
RESERVED = 0.1
"""Share of the budget for what follows training: boosted trees and the page."""

_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Round:
    """One more seed of each of ``gates``, in at most ``max_seconds`` per run."""

    gates: list[str]
    max_seconds: float


@dataclass(frozen=True)
class Trained:
    """What is known of a network after a round: its mean validation loss, and the seconds of a run."""

    validation_loss: float
    seconds: float


def parse_budget(text: str) -> float | None:
    """Seconds of "90s", "10m" or "1.5h"; None for "none". Any other text raises ValueError."""
    if text == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"must be a time such as 90s, 10m or 1h, or none, got {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def first_round(gates: list[str], runs: int, seconds: float, workers: int) -> Round:
    """All networks: one seed of each, or all ``runs`` that a resumed comparison still has to train."""
    return Round(gates, FIRST_SHARE * seconds * workers / max(runs, workers))


def next_round(trained: Mapping[str, Trained], seconds: float, workers: int) -> Round | None:
    """One more seed of the best of the networks of the last round, or None if it would not end in time."""
    dense = [gate for gate in trained if is_dense(gate)]
    mixtures = sorted(
        (gate for gate in trained if gate not in dense), key=lambda g: trained[g].validation_loss
    )
    gates = [*dense, *mixtures[: ceil(len(mixtures) / 2)]]
    needed = sum(trained[gate].seconds for gate in gates) / workers
    longest = max((trained[gate].seconds for gate in gates), default=0.0)
    if not gates or max(needed, longest) > seconds:
        return None
    return Round(gates, seconds * workers / max(len(gates), workers))
