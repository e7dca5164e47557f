"""The baselines without a mixture: experts whose widths change until they have a given cost."""

from collections.abc import Callable, Sequence

import torch

from comet_moe.experts import Experts

BuildExpert = Callable[[float], Experts]
"""Builds one expert whose layers are wider by a factor."""


def scale_widths(widths: Sequence[int], factor: float) -> tuple[int, ...]:
    """Each width times ``factor``, rounded, at least 1."""
    return tuple(max(1, round(width * factor)) for width in widths)


def build_wider_expert(build: BuildExpert, cost_of: Callable[[Experts], int], target: int) -> Experts:
    """The expert whose cost is closest to ``target``.

    Args:
        build: builds an expert for a factor on its widths; its cost grows with the factor.
        cost_of: operations per row (:func:`operations`) or number of parameters (:func:`parameters`).
        target: the cost to come close to; the factor is at most 1 or target / cost_of(build(1)).
    """

    def cost(factor: float) -> int:
        with torch.device("meta"):  # shapes only
            return cost_of(build(factor))

    low, high = 0.0, max(1.0, target / cost(1.0))
    for _ in range(40):  # halves the interval to far below one unit of width
        middle = (low + high) / 2
        low, high = (middle, high) if cost(middle) <= target else (low, middle)
    best = min((low, high), key=lambda factor: abs(cost(factor) - target))
    return build(best)


def operations(experts: Experts) -> int:
    """Floating-point operations of one expert on one row."""
    return experts.flops()


def parameters(experts: Experts) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in experts.parameters())
