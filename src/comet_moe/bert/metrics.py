"""How good predicted classes are, from plain arrays.

From start and end scores to answers, and how good those are: SQuAD v2.0's own rules.

An example is a question on a context; a context that is too long for the model is several features, windows
that overlap. Shapes: T tokens of a feature.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def class_metrics(names: tuple[str, ...], predicted: Array, labels: Array) -> dict[str, float]:
    """The metrics called ``names``, in their order."""
    return {name: _METRICS[name](predicted, labels) for name in names}


def accuracy(predicted: Array, labels: Array) -> float:
    """Share of rows that are right."""
    return float(np.mean(predicted == labels)) if len(labels) else float("nan")


def f1(predicted: Array, labels: Array) -> float:
    """2PR / (P + R) of class 1; 0 where no row is right about it."""
    hits = float(np.sum((predicted == 1) & (labels == 1)))
    found = float(np.sum(predicted == 1) + np.sum(labels == 1))
    return 2 * hits / found if found else 0.0


def matthews(predicted: Array, labels: Array) -> float:
    """Correlation of two classes, -1..1; 0 where one side has a single class."""
    yes, no = predicted == 1, predicted != 1
    tp, fp = float(np.sum(yes & (labels == 1))), float(np.sum(yes & (labels != 1)))
    fn, tn = float(np.sum(no & (labels == 1))), float(np.sum(no & (labels != 1)))
    scale = ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    return (tp * tn - fp * fn) / scale if scale else 0.0


_METRICS = {"accuracy": accuracy, "f1": f1, "matthews": matthews}


BEST = 20
"""Starts and ends that are combined, the best ones of each feature."""

LONGEST = 30
"""Tokens of an answer."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Window(NamedTuple):
    """One feature, as scored.

    Attributes:
        start, end: (T,) scores; those of token 0 are for "no answer".
        offsets: (T, 2) where in the context each token stands, -1 where it is not of the context.
    """

    start: Array
    end: Array
    offsets: Array


class Answer(NamedTuple):
    """The best answer of an example, and how much better "no answer" scores."""

    text: str
    null_margin: float


def best_answer(context: str, windows: Sequence[Window]) -> Answer:
    """The stretch of ``context`` with the highest start + end score in any window.

    ``null_margin`` is the lowest score of "no answer" over the windows minus that of the best stretch.
    """
    null = min(float(window.start[0] + window.end[0]) for window in windows)
    best, text = -np.inf, ""
    for window in windows:
        score, first, last = _best_stretch(window)
        if score > best:
            best, text = score, context[window.offsets[first, 0] : window.offsets[last, 1]]
    return Answer(text, null - best)


def _best_stretch(window: Window) -> tuple[float, int, int]:
    """Score, first and last token; -inf where no token is of the context."""
    inside = np.flatnonzero(window.offsets[:, 0] >= 0)
    starts = inside[np.argsort(-window.start[inside], kind="stable")[:BEST]]
    ends = inside[np.argsort(-window.end[inside], kind="stable")[:BEST]]
    length = ends[None, :] - starts[:, None] + 1
    scores = window.start[starts][:, None] + window.end[ends][None, :]
    scores = np.where((length >= 1) & (length <= LONGEST), scores, -np.inf)
    if not np.isfinite(scores).any():
        return -np.inf, 0, 0
    row, column = np.unravel_index(int(scores.argmax()), scores.shape)
    return float(scores[row, column]), int(starts[row]), int(ends[column])


def answer_metrics(
    answers: Sequence[Answer], gold: Sequence[Sequence[str]], threshold: float = 0.0
) -> dict[str, float]:
    """F1 and exact match, "no answer" being given where ``null_margin`` is above ``threshold``.

    ``best_f1``, ``best_exact_match`` and their thresholds are those of the threshold that is best for each.
    An example without gold answers is right if none is given.
    """
    given = np.array(
        [answer_scores(answer.text, truths) for answer, truths in zip(answers, gold, strict=True)]
    )
    none = np.array([answer_scores("", truths) for truths in gold])
    margins = np.array([answer.null_margin for answer in answers])
    chosen = np.where((margins > threshold)[:, None], none, given).mean(0)
    (best_f1, f1_at), (best_exact, exact_at) = (
        _best_threshold(given[:, place], none[:, place], margins) for place in (0, 1)
    )
    return {
        "f1": float(chosen[0]),
        "exact_match": float(chosen[1]),
        "best_f1": best_f1,
        "best_f1_threshold": f1_at,
        "best_exact_match": best_exact,
        "best_exact_match_threshold": exact_at,
    }


def _best_threshold(given: Array, none: Array, margins: Array) -> tuple[float, float]:
    """The highest mean that a threshold on ``margins`` gives, and the lowest such threshold.

    By falling threshold, answers turn into "no answer" one margin after the other.
    """
    order = np.argsort(margins, kind="stable")
    gain = np.concatenate(([0.0], np.cumsum((given - none)[order])))
    # A threshold cannot part equal margins.
    ordered = margins[order]
    allowed = np.concatenate(([True], ordered[1:] != ordered[:-1], [True]))
    best = int(np.where(allowed, gain, -np.inf).argmax())
    threshold = ordered[best - 1] if best else ordered[0] - 1.0
    return float((none.sum() + gain[best]) / len(margins)), float(threshold)


def answer_scores(answer: str, truths: Sequence[str]) -> tuple[float, float]:
    """(F1 over words, exact match) with the nearest of ``truths``; none means that "" is right."""
    truths = [truth for truth in truths if normalized(truth)] or [""]
    return max(word_f1(answer, truth) for truth in truths), max(
        float(normalized(answer) == normalized(truth)) for truth in truths
    )


def word_f1(answer: str, truth: str) -> float:
    """2PR / (P + R) over normalised words; where one side has none, 1 if both have none."""
    ours, theirs = normalized(answer).split(), normalized(truth).split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))


def normalized(text: str) -> str:
    """Lower case, without punctuation, articles and extra blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
