"""Ratios of times from one interleaved run: a, b, a, b, ..., so that both run under the same conditions."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

Function = Callable[[], object]

MIN_PAIRS = 5


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of neighbouring times.

    Attributes:
        value: the median.
        low, high: the quartiles.
        seconds: median time of the measured function.
        reference_seconds: median time of the reference.
        pairs: number of ratios.
    """

    value: float
    low: float
    high: float
    seconds: float
    reference_seconds: float
    pairs: int


def measure_ratio(
    function: Function,
    reference: Function,
    seconds: float,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Ratio:
    """The time of ``function`` divided by the time of ``reference``; arguments as :func:`measure_ratios`."""
    return measure_ratios([function, reference], seconds, calls, clock)[0]


def measure_ratios(
    functions: Sequence[Function],
    seconds: float,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Ratio]:
    """The times of all functions but the last, each divided by the time of the last, in one interleaved run.

    Args:
        functions: the last is the reference. Each is called twice before the first reading.
        seconds: time to spend, about; there are at least five pairs however long they take.
        calls: calls per reading, for functions that take microseconds.
        clock: returns seconds.
    """
    for function in functions:
        function()
        function()
    readings: list[list[float]] = [[] for _ in functions]
    end = clock() + seconds
    while len(readings[0]) < MIN_PAIRS or clock() < end:
        for function, times in zip(functions, readings, strict=True):
            start = clock()
            for _ in range(calls):
                function()
            times.append((clock() - start) / calls)
    *measured, reference = readings
    return [_summarize(times, reference) for times in measured]


def divide(a: Ratio, b: Ratio) -> Ratio:
    """The quotient of two ratios with the same reference, with the quartiles of the first."""
    return Ratio(a.value / b.value, a.low / b.value, a.high / b.value, a.seconds, b.seconds, a.pairs)


def invert(a: Ratio) -> Ratio:
    """The reference of ``a`` by what it was measured against."""
    return Ratio(1 / a.value, 1 / a.high, 1 / a.low, a.reference_seconds, a.seconds, a.pairs)


def _summarize(times: list[float], reference: list[float]) -> Ratio:
    ratios = [a / b for a, b in zip(times, reference, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return Ratio(median(ratios), low, high, median(times), median(reference), len(ratios))
