"""Does a gate route? The verdict in a word, and what to try if it does not.

The numbers come from :mod:`comet_moe.statistics`, or from the files of a run. This module imports neither
torch nor other modules of the library.
"""

from collections.abc import Sequence
from math import log
from typing import Literal

STATIC_INFORMATION = 0.01
"""Information in nats below which a gate makes the same decision for every sample, up to noise."""

COLLAPSED_RATIO = 1.1
"""Below this ratio, samples share their experts.

The ratio divides the experts of all samples together by the experts of one sample. By weight it is
exp(information). By selection it is the effective experts divided by the selected experts per sample.
"""

Verdict = Literal["routes", "static", "collapsed", "dense"]
Problem = Literal["static", "collapsed"]

_ALSO = "start dense (WarmupGate, in a recipe gate.warmup_epochs), or use a dense network of the same cost"
_MEANING: dict[Problem, str] = {
    "static": "every sample gets the same experts",
    "collapsed": "nearly all samples share their experts",
}
_ADVICE: dict[Problem, str] = {
    "static": "RegularizedGate(gate, information=1.0), in a recipe gate.information=1",
    "collapsed": "RegularizedGate(gate, load_balance=0.01) or TopKGate(bias_update=1e-3), in a recipe "
    "gate.load_balance=0.01 or gate.bias_update=1e-3",
}


def verdict(
    *,
    experts_per_sample: float,
    effective_experts: float,
    information: float,
    dead_experts: int,
    num_choices: int,
) -> Verdict:
    """What a gate does with the samples of a data set, in a word.

    - "dense": every sample uses every expert.
    - "static": every sample gets the same few experts with the same weights. Information is below 0.01 nats.
    - "collapsed": all samples together use hardly more experts than one sample alone. Either information is
      below log 1.1 nats. Or there are fewer than 1.1 effective experts per selected expert, and some experts
      are dead. An example: all samples select the same two experts with different weights.
    - "routes": different samples go to different experts.

    Args:
        experts_per_sample, effective_experts, information, num_choices: see
            :meth:`comet_moe.statistics.RoutingStatistics.result`.
        dead_experts: number of experts that no sample selects.
    """
    if experts_per_sample > num_choices - 1e-3:
        return "dense"
    if information < STATIC_INFORMATION:
        return "static"
    is_shared = effective_experts < COLLAPSED_RATIO * max(1.0, experts_per_sample)
    if information < log(COLLAPSED_RATIO) or (is_shared and dead_experts):
        return "collapsed"
    return "routes"


def explain(problem: Problem, gates: Sequence[str], numbers: str) -> str:
    """One sentence for a warning: which gates do not route, the numbers that show it, and what to try.

    Example:
        >>> from comet_moe.diagnosis import explain
        >>> explain("static", ["watched"], "information 0.000 nats").partition(";")[0]
        'gate watched is static: every sample gets the same experts (information 0.000 nats)'
    """
    subject = f"gate {gates[0]} is" if len(gates) == 1 else f"gates {', '.join(gates)} are"
    return f"{subject} {problem}: {_MEANING[problem]} ({numbers}); try {_ADVICE[problem]}, {_ALSO}"
