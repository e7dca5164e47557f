"""A result of the benchmark: what was measured, its value and its target."""

from dataclasses import dataclass

from benchmarks.timing import Ratio


@dataclass(frozen=True)
class Result:
    """One case of a measurement.

    Attributes:
        measurement: what is divided by what.
        case: shapes and states.
        value: the ratio; None if it could not be measured.
        target: the largest value that meets the target; with ``exact``, the only one. Infinity: no target.
        exact: whether the value must equal the target.
        ratio: quartiles and times; None for a ratio of counts.
        note: why there is no value.
    """

    measurement: str
    case: str
    value: float | None
    target: float
    exact: bool = False
    ratio: Ratio | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where nothing could be measured."""
        if self.value is None:
            return None
        return self.value == self.target if self.exact else self.value <= self.target


def timed_result(measurement: str, case: str, ratio: Ratio, target: float, scale: float = 1.0) -> Result:
    """The result of timing; its value is the ratio divided by ``scale``."""
    return Result(measurement, case, ratio.value / scale, target, ratio=ratio)
