"""Random search: the values of trial i, by the seed, the gate and i alone.

So the set of trials is the same whatever the number of workers, and asking for more later adds to it.
"""

import math
import zlib
from typing import Any

import numpy as np

from comet_moe.config import Choice, LogUniform, SearchSpace


def draw(space: SearchSpace, gate: str, seed: int, index: int) -> dict[str, Any]:
    """Trial ``index`` of ``gate``: a value for each setting of ``space``."""
    generator = np.random.default_rng([seed, zlib.crc32(gate.encode()), index])
    values: dict[str, Any] = {}
    for key, source in sorted(space.items()):
        if isinstance(source, Choice):
            values[key] = source.choice[generator.integers(len(source.choice))]
        elif isinstance(source, LogUniform):
            low, high = source.log
            value = math.exp(generator.uniform(math.log(low), math.log(high)))
            values[key] = min(max(value, low), high)  # exp(log(x)) may miss x by a digit
        else:
            values[key] = float(generator.uniform(*source.uniform))
    return values
