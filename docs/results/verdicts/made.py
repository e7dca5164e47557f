"""Five made-up tables whose verdict is known: python made.py FOLDER [DRAW]

The numbers x0, x1, x2 are uniform with deviation 1, `left` and `up` are "no" or "yes", `shop` is one of eight
names. A wave is the sum of the sines of 16 directions in the numbers, of variance 1. Noise has a deviation of
0.05.

regimes   y is another wave in each of four regimes, chosen by `left` and `up`: a mixture must pay
formula   y has one formula: a mixture must not pay
conflict  y and z are steeper waves of other directions in the same numbers: one expert per task must pay
keys      y is another wave in each shop, and the shops have no order: hash routing must pay
noise     y has nothing to do with the columns: nothing must pay

The waves are the same in all draws; rows and noise differ.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

ROWS = 8000
NUMBERS, DIRECTIONS, FREQUENCY, NOISE = 3, 16, 3.0, 0.05
STEEPER = 1.5
"""Factor on the frequency in `conflict`: one network of both tasks must be too narrow for the waves."""
TARGETS = {"regimes": "y", "formula": "y", "conflict": "y,z", "keys": "y", "noise": "y"}
SHOPS = np.array([f"shop {letter}" for letter in "ABCDEFGH"])


def wave(x: np.ndarray, index: int) -> np.ndarray:
    """One value per row of ``x`` (rows, numbers); every ``index`` has other directions."""
    directions = np.random.default_rng([5, index]).normal(size=(DIRECTIONS, NUMBERS))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return np.sin(FREQUENCY * x @ directions.T).sum(1) / np.sqrt(DIRECTIONS / 2)


def make(name: str, draw: int, rows: int = ROWS) -> pd.DataFrame:
    """The table called ``name``; every ``draw`` has other rows."""
    random = np.random.default_rng([draw, list(TARGETS).index(name)])
    x = random.uniform(-np.sqrt(3), np.sqrt(3), size=(rows, NUMBERS))
    left, up, shop = random.integers(0, 2, rows), random.integers(0, 2, rows), random.integers(0, 8, rows)
    noise = NOISE * random.normal(size=(2, rows))
    words = np.array(["no", "yes"])
    table = pd.DataFrame({f"x{index}": values for index, values in enumerate(x.T)})
    columns = {"shop": SHOPS[shop]} if name == "keys" else {"left": words[left], "up": words[up]}
    table = table.assign(**columns)
    if name == "noise":
        return table.assign(y=random.normal(size=rows))
    if name == "conflict":
        return table.assign(y=wave(STEEPER * x, 0) + noise[0], z=wave(STEEPER * x, 1) + noise[1])
    if name == "formula":
        return table.assign(y=np.sin(2 * x[:, 0]) + np.cos(2 * x[:, 1]) * x[:, 2] + noise[0])
    which = {"regimes": 2 * left + up, "keys": shop}[name]
    waves = np.stack([wave(x, index) for index in range(which.max() + 1)])
    return table.assign(y=waves[which, np.arange(rows)] + noise[0])


if __name__ == "__main__":
    folder, draw = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    folder.mkdir(parents=True, exist_ok=True)
    for name in TARGETS:
        make(name, draw).to_csv(folder / f"{name}-{draw}.csv", index=False)
