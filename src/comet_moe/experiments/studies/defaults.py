"""Defaults and limits of studies and of their tables. No heavy imports: `--help` shows them."""

from typing import Literal

DEFAULT_TRIALS = {"tuning": 500, "ablation": 100}
"""Trials per gate, by kind of study, as in the paper."""

MAX_TRIALS = 100_000
"""Trials per gate of a study, at most."""

DEFAULT_SEED = 0
"""Seed of the sampling."""

DEFAULT_HEARTBEAT = 10
"""Seconds between two heartbeats."""

MAX_LOST_WORKERS = 5
"""Workers that a trial may lose, without finishing another epoch, before it counts as failed."""

FRONTIER = ("dense-0.5x", "dense", "dense-2x")
"""Dense networks of several widths: what a mixture has to beat at its own operations."""

DEFAULT_GATES = {
    "tuning": (*FRONTIER, "softmax", "hash", "topk", "topk+", "dselect", "comet", "comet+"),
    "ablation": (*FRONTIER, "hash", "hash+", "topk", "topk+", "comet", "comet+"),
    "comparison": (*FRONTIER, "softmax", "topk", "sigmoid", "comet", "comet+"),
}
"""The gates of `tune`, `ablate` and `compare`; the first two have those of the paper's tables."""

PruneMethod = Literal["median", "hyperband"]
"""Optuna's pruners that a study can use."""

TOP_PERCENT = 5.0
"""Share of a tuning study's trials that count, the best by validation loss."""

DEFAULT_REPEATS = 1000
"""Random draws per number of trials, and resamples of the bootstrap."""

MAX_TASKS = 3
"""Up to this number of tasks, each task has its own metric columns; above it, the columns are means."""
