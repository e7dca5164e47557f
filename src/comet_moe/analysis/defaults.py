"""Defaults of `table` and `curves`, which their `--help` shows. No imports: `--help` loads this."""

from typing import Literal

TOP_PERCENT = 5.0
"""Share of a tuning study's trials that count, the best by validation loss."""

DEFAULT_REPEATS = 1000
"""Random draws per number of trials, and resamples of the bootstrap."""

PruneMethod = Literal["median", "hyperband"]
"""Optuna's pruners that a study can use."""
