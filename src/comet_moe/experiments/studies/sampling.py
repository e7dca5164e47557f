"""Random search: the values of trial i depend on the seed, the gate and i alone.

So the trials are the same for any number of workers, and trials that are added later do not change the first.
"""

import math
import zlib
from typing import Any

import numpy as np

from comet_moe.experiments.config import Choice, LogUniform, SearchSpace


def sample_values(space: SearchSpace, gate: str, seed: int, index: int) -> dict[str, Any]:
    """A value for each setting of ``space``, for trial ``index`` of ``gate``."""
    generator = np.random.default_rng([seed, zlib.crc32(gate.encode()), index])
    values: dict[str, Any] = {}
    for setting, distribution in sorted(space.items()):
        if isinstance(distribution, Choice):
            values[setting] = distribution.choice[generator.integers(len(distribution.choice))]
        elif isinstance(distribution, LogUniform):
            low, high = distribution.log
            value = math.exp(generator.uniform(math.log(low), math.log(high)))
            values[setting] = min(max(value, low), high)  # exp(log(x)) may miss x by a digit
        else:
            values[setting] = float(generator.uniform(*distribution.uniform))
    return values
