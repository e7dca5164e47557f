"""Tables for which it is known whether a mixture pays.

| table | what is in it | the right verdict |
|---|---|---|
| regimes | four formulas, chosen by the signs of two columns | a mixture pays; experts are regimes |
| one-formula | one of these formulas for all rows | no mixture pays |
| conflict | two targets with formulas of their own | one expert per target pays; routing does not matter |
| keys | a formula of its own for each value of a column | hash routing by that column pays |
| noise | a target that no column explains | nothing pays |
"""

from collections.abc import Callable

import numpy as np
import pandas as pd

FEATURES = 8
REGIMES = 4
KEYS = 24
NOISE = 0.1


def regimes(rows: int, seed: int) -> pd.DataFrame:
    table, random = _features(rows, seed)
    table["a"], table["b"] = random.uniform(-1, 1, (2, rows))
    regime = 2 * (table["a"] > 0) + (table["b"] > 0)
    return _with_target(table, random, regime.to_numpy())


def one_formula(rows: int, seed: int) -> pd.DataFrame:
    table, random = _features(rows, seed)
    table["a"], table["b"] = random.uniform(-1, 1, (2, rows))
    return _with_target(table, random, np.zeros(rows, int))


def conflict(rows: int, seed: int) -> pd.DataFrame:
    table, random = _features(rows, seed)
    table = _with_target(table, random, np.zeros(rows, int), "first")
    return _with_target(table, random, np.zeros(rows, int), "second", table.columns[:FEATURES])


def keys(rows: int, seed: int) -> pd.DataFrame:
    table, random = _features(rows, seed)
    key = random.integers(KEYS, size=rows)
    table = _with_target(table, random, key)
    table.insert(0, "key", [f"k{value}" for value in key])
    return table


def noise(rows: int, seed: int) -> pd.DataFrame:
    table, random = _features(rows, seed)
    return table.assign(y=random.normal(size=rows))


TABLES: dict[str, Callable[[int, int], pd.DataFrame]] = {
    "regimes": regimes,
    "one-formula": one_formula,
    "conflict": conflict,
    "keys": keys,
    "noise": noise,
}


def _features(rows: int, seed: int) -> tuple[pd.DataFrame, np.random.Generator]:
    random = np.random.default_rng(seed)
    values = random.uniform(-1, 1, (rows, FEATURES))
    return pd.DataFrame(values, columns=[f"x{index}" for index in range(FEATURES)]), random


def _with_target(
    table: pd.DataFrame,
    random: np.random.Generator,
    regime: np.ndarray,
    name: str = "y",
    columns: pd.Index | None = None,
) -> pd.DataFrame:
    """``table`` with the target sin(2 v_r·x) + w_r·x and noise, v and w of the row's regime r."""
    x = table[[f"x{index}" for index in range(FEATURES)]].to_numpy()
    v, w = random.normal(size=(2, regime.max() + 1, FEATURES))
    y = np.sin(2 * (x * v[regime]).sum(1)) + (x * w[regime]).sum(1)
    return table.assign(**{name: y + NOISE * random.normal(size=len(table))})
