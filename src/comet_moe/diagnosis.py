"""Does a gate route? A word for it, and what to try if it does not. No imports of the library, no torch.

The numbers come from :mod:`comet_moe.statistics`, or from what a run has written of them.
"""

from collections.abc import Sequence
from typing import Literal

STATIC_INFORMATION = 0.01
"""Nats below which a gate decides the same for every sample, up to noise."""

COLLAPSED_SHARE = 1.1
"""Effective experts below this multiple of the experts per sample: nearly all samples share their experts."""

Verdict = Literal["routes", "static", "collapsed", "dense"]
Problem = Literal["static", "collapsed"]

_ALSO = "start dense (WarmupGate, in a recipe gate.warmup_epochs), or use a dense network of the same cost"
_MEANING: dict[Problem, str] = {
    "static": "every sample gets the same experts",
    "collapsed": "nearly all samples share their experts",
}
_ADVICE: dict[Problem, str] = {
    "static": "RegularizedGate(gate, information=1.0), in a recipe gate.information=1",
    "collapsed": "RegularizedGate(gate, load_balance=0.01), in a recipe gate.load_balance=0.01",
}


def verdict(experts_per_sample: float, effective_experts: float, information: float, n: int) -> Verdict:
    """In a word, what a gate over ``n`` experts does with the samples of a data set.

    - "dense": every sample uses every expert;
    - "static": the same few experts for every sample: information below 0.01 nats;
    - "collapsed": hardly more experts in effect than one sample uses, so that most samples share theirs;
    - "routes": different samples go to different experts.
    """
    if experts_per_sample > n - 1e-3:
        return "dense"
    if information < STATIC_INFORMATION:
        return "static"
    if effective_experts < COLLAPSED_SHARE * max(1.0, experts_per_sample):
        return "collapsed"
    return "routes"


def explain(problem: Problem, gates: Sequence[str], numbers: str) -> str:
    """One sentence for a warning: which gates do not route, by which numbers, and what to try.

    Example:
        >>> from comet_moe.diagnosis import explain
        >>> explain("static", ["watched"], "information 0.000 nats").partition(";")[0]
        'gate watched is static: every sample gets the same experts (information 0.000 nats)'
    """
    subject = f"gate {gates[0]} is" if len(gates) == 1 else f"gates {', '.join(gates)} are"
    return f"{subject} {problem}: {_MEANING[problem]} ({numbers}); try {_ADVICE[problem]}, {_ALSO}"
