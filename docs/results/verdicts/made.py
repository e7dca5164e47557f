"""Five made-up tables whose verdict is known: python made.py FOLDER [DRAW]

x0 ... x5 are normal, `left` and `up` are 0 or 1, `shop` is one of eight names. Noise has a deviation of 0.1.

regimes   y has another formula in each of four regimes, chosen by `left` and `up`: a mixture must pay
formula   y has one formula: a mixture must not pay
conflict  two targets are opposite functions of the same inputs: one expert per task must pay
keys      y has another formula in each shop, and the shops have no order: hash routing must pay
noise     y has nothing to do with the columns: nothing must pay
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

ROWS = 8000
TARGETS = {"regimes": "y", "formula": "y", "conflict": "y,z", "keys": "y", "noise": "y"}


def _formulas(x: np.ndarray) -> list[np.ndarray]:
    return [np.sin(2 * x[0]) + x[1], x[0] * x[1], x[2] ** 2 - x[0], np.cos(2 * x[3]) * x[2]]


def make(name: str, draw: int, rows: int = ROWS) -> pd.DataFrame:
    """The table called ``name``; every ``draw`` has other rows."""
    random = np.random.default_rng([draw, list(TARGETS).index(name)])
    x = random.normal(size=(6, rows))
    left, up, shop = random.integers(0, 2, rows), random.integers(0, 2, rows), random.integers(0, 8, rows)
    table = pd.DataFrame({f"x{index}": values for index, values in enumerate(x)})
    table = table.assign(left=left, up=up, shop=np.array([f"shop {letter}" for letter in "ABCDEFGH"])[shop])
    noise = 0.1 * random.normal(size=(2, rows))
    formulas = np.stack(_formulas(x))
    each = np.arange(rows)
    if name == "regimes":
        return table.assign(y=formulas[2 * left + up, each] + noise[0])
    if name == "formula":
        return table.assign(y=formulas[0] + formulas[3] + noise[0])
    if name == "conflict":
        both = np.sin(3 * x[0]) * x[1] + np.cos(2 * x[2]) * x[3]
        return table.assign(y=both + noise[0], z=np.sin(3 * x[1]) * x[2] - np.cos(2 * x[3]) * x[0] + noise[1])
    if name == "keys":
        weights = np.random.default_rng(0).normal(size=(8, 6))  # the shops of all draws
        bent = (
            np.sin(1.5 * (weights[shop] * x.T).sum(1))
            + (np.roll(weights, 3, 1)[shop] * np.abs(x.T)).sum(1) / 2
        )
        return table.assign(y=bent + noise[0])
    return table.assign(y=random.normal(size=rows))


if __name__ == "__main__":
    folder, draw = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    folder.mkdir(parents=True, exist_ok=True)
    for name in TARGETS:
        make(name, draw).to_csv(folder / f"{name}-{draw}.csv", index=False)
