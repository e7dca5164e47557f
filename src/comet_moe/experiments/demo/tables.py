"""Two made-up tables with two columns, so that the regions of experts can be drawn.

In the first one each of four regions of the plane has a formula of its own. In the second one formula holds
everywhere. Points, noise and number of rows are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

Array = npt.NDArray[Any]

ROWS = 4000
NOISE = 0.2
TILT = 0.35
COLUMNS = ("left_right", "down_up")


@dataclass(frozen=True)
class MadeTable:
    """A table whose target is ``formula`` of two columns, plus noise.

    Attributes:
        name: the name of its file, and of the study on it.
        words: what it is, in a sentence.
        formula: (B, 2) points of [-1, 1]² -> (B,).
    """

    name: str
    words: str
    formula: Callable[[Array], Array]

    def write(self, folder: Path) -> Path:
        """Write the rows to a CSV file in ``folder``; they are the same each time."""
        generator = np.random.default_rng(0)
        points = generator.uniform(-1, 1, (ROWS, 2))
        target = self.formula(points) + generator.normal(0, NOISE, ROWS)
        path = folder / f"{self.name}.csv"
        rows = pd.DataFrame(points, columns=list(COLUMNS)).assign(target=target)
        rows.to_csv(path, index=False)
        return path


def four_formulas(points: Array) -> Array:
    """Another formula in each quarter of the plane, cut along two tilted lines."""
    x, y = points.T
    first, second = x + TILT * y > 0, y - TILT * x > 0
    upper = np.where(first, np.sin(3 * x), -1 - 4 * x * y)
    return np.where(second, upper, np.where(first, 1 - 2 * y, np.cos(4 * y)))


def one_formula(points: Array) -> Array:
    """The same smooth formula everywhere."""
    x, y = points.T
    return np.sin(2 * x) + x * y


TABLES = (
    MadeTable("four-regions", "The target has another formula in each of four regions.", four_formulas),
    MadeTable("one-formula", "The target has the same smooth formula everywhere.", one_formula),
)
