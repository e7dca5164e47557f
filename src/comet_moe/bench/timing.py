"""Ratios of times, from one interleaved run: a, b, a, b, ... so that both meet the same machine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

Call = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """Median of the ratios of neighbouring times, with their quartiles, and the median times in seconds."""

    value: float
    low: float
    high: float
    seconds: float
    reference_seconds: float
    pairs: int


def ratio(call: Call, reference: Call, seconds: float, calls: int = 1) -> Ratio:
    """Time of ``call`` over time of ``reference``.

    Args:
        call: what is measured.
        reference: what it is measured against.
        seconds: to spend, about; at least five pairs are taken.
        calls: of each in one reading, for what takes microseconds.
    """
    return ratios([call, reference], seconds, calls)[0]


def ratios(calls_: Sequence[Call], seconds: float, calls: int = 1) -> list[Ratio]:
    """The times of all but the last call over the time of the last, in one interleaved run."""
    for call in calls_:
        call()
        call()
    readings: list[list[float]] = [[] for _ in calls_]
    end = time.perf_counter() + seconds
    while len(readings[0]) < 5 or time.perf_counter() < end:
        for call, times in zip(calls_, readings, strict=True):
            started = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - started) / calls)
    *measured, reference = readings
    return [_ratio(times, reference) for times in measured]


def _ratio(times: list[float], reference: list[float]) -> Ratio:
    each = [a / b for a, b in zip(times, reference, strict=True)]
    low, _, high = quantiles(each, n=4)
    return Ratio(median(each), low, high, median(times), median(reference), len(each))
