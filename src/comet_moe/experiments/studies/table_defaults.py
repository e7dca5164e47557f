"""Defaults of `table` and `curves`, limits of studies. No imports: `--help` shows them and loads this."""

from typing import Literal

TOP_PERCENT = 5.0
"""Share of a tuning study's trials that count, the best by validation loss."""

DEFAULT_REPEATS = 1000
"""Random draws per number of trials, and resamples of the bootstrap."""

MAX_TRIALS = 100_000
"""Trials per gate of a study, at most."""

PruneMethod = Literal["median", "hyperband"]
"""Optuna's pruners that a study can use."""
