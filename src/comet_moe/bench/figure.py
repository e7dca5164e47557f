"""A figure of the benchmark: what is measured, what it should be, and what it came to."""

from dataclasses import dataclass

from comet_moe.bench.timing import Ratio


@dataclass(frozen=True)
class Row:
    """One measured case of a figure.

    Attributes:
        figure: what is divided by what.
        case: shapes and states.
        value: the ratio.
        target: the largest value that meets the target; for a ratio that must be 1, exactly that.
        ratio: spread and times; None for a ratio of counts.
        note: why there is no value, or what else to know.
    """

    figure: str
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


def measured(figure: str, case: str, ratio: Ratio, target: float, scale: float = 1.0) -> Row:
    """A row from times; ``scale`` divides the ratio, where the target is on a multiple of something."""
    return Row(figure, case, ratio.value / scale, target, ratio=ratio)
