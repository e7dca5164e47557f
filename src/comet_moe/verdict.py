"""Does a gate route? The verdict in a word, and what to try if it does not.

The numbers come from :mod:`comet_moe.statistics`, or from the files of a run. This module imports neither
torch nor other modules of the library.
"""

from collections.abc import Sequence
from typing import Literal

Verdict = Literal["routes", "blends", "static", "dense"]
Problem = Literal["static", "blends"]

STATIC_INFORMATION = 0.01
"""Information in nats below which the weights are the same for every sample, up to noise."""

SHARED_EXPERTS = 0.9
"""Share of common experts above which two samples run the same experts, up to a few samples.

An example: 95 % of the samples run one set of experts, the others another one. Two samples drawn at random
then have 0.95² + 0.05² = 0.905 of their experts in common.
"""

NUMBERS = ("experts_per_sample", "shared_experts", "information", "num_choices")
"""What a verdict is made of."""

_MEANING: dict[Problem, str] = {
    "static": "every sample gets the same experts with the same weights",
    "blends": "the same experts run for nearly all samples, and only their weights differ",
}
_ADVICE: dict[Problem, str] = {
    "static": "RegularizedGate(gate, information=1.0), in a recipe gate.information=1",
    "blends": "RegularizedGate(gate, load_balance=0.01) or TopKGate(bias_update=1e-3), in a recipe "
    "gate.load_balance=0.01 or gate.bias_update=1e-3",
}
_ALSO = "start dense (WarmupGate, in a recipe gate.warmup_epochs), or use a dense network"


def verdict(
    *, experts_per_sample: float, shared_experts: float, information: float, num_choices: int
) -> Verdict:
    """What a gate does with the samples of a data set, in a word.

    - "dense": every sample runs every expert.
    - "routes": other samples run other experts. Two samples have at most 0.9 of their experts in common.
    - "static": the same experts run for all samples, with the same weights: information below 0.01 nats.
    - "blends": the same experts run for all samples, with weights that depend on the sample.

    Dead experts are a number beside the verdict: a gate can route among a few experts and never use the rest.

    Args:
        experts_per_sample, shared_experts, information, num_choices: see
            :meth:`comet_moe.statistics.RoutingStatistics.result`.

    Example:
        >>> from comet_moe.verdict import verdict
        >>> verdict(experts_per_sample=2.0, shared_experts=1.0, information=0.69, num_choices=8)
        'blends'
    """
    if experts_per_sample > num_choices - 1e-3:
        return "dense"
    if shared_experts <= SHARED_EXPERTS:
        return "routes"
    return "static" if information < STATIC_INFORMATION else "blends"


def explain(problem: Problem, gates: Sequence[str], numbers: str) -> str:
    """One sentence for a warning: which gates do not route, the numbers that show it, and what to try.

    Example:
        >>> from comet_moe.verdict import explain
        >>> explain("static", ["watched"], "information 0.000 nats").partition(":")[0]
        'gate watched is static'
    """
    one = len(gates) == 1
    subject = f"gate {gates[0]}" if one else f"gates {', '.join(gates)}"
    verb = ("is static" if one else "are static") if problem == "static" else ("blends" if one else "blend")
    return f"{subject} {verb}: {_MEANING[problem]} ({numbers}); try {_ADVICE[problem]}, {_ALSO}"


def describe_numbers(
    *, information: float, shared_experts: float, experts_per_sample: float, num_choices: int
) -> str:
    """The numbers behind a verdict, for a warning or a note."""
    return (
        f"information {information:.3f} nats, {experts_per_sample:.2f} of {num_choices} experts per sample, "
        f"{100 * shared_experts:.0f} % of them in common with another sample"
    )
