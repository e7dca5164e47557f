"""The best of s trials drawn at random: in closed form, and by drawing.

Shapes: N trials, S budgets, R repeats. Trials are given by rank, the best validation loss first.
"""

import numpy as np
from numpy.typing import NDArray

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
